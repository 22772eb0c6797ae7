/* Stand-in for libcute_dsl_runtime.so on a machine without CUDA.
 *
 * The host code that CuTe DSL compiles calls these symbols. Every call goes to one hook that Python installs, so that
 * the real host code runs and the launch it makes can be recorded. Signatures follow the CUDA runtime and driver
 * functions of the same names; cuda_dialect_init_library_once(handle, load, load_on_device, report) calls `load` once
 * and then `load_on_device` per device. */
#include <stdint.h>
#include <stddef.h>

typedef int (*hook_t)(const char *name, uint64_t a0, uint64_t a1, uint64_t a2, uint64_t a3);
static hook_t hook;

void ptx_sim_set_hook(hook_t function) { hook = function; }

static int call(const char *name, uint64_t a0, uint64_t a1, uint64_t a2, uint64_t a3) {
    return hook ? hook(name, a0, a1, a2, a3) : 100; /* cudaErrorNoDevice */
}

#define FORWARD(name) \
    int name(uint64_t a0, uint64_t a1, uint64_t a2, uint64_t a3) { return call(#name, a0, a1, a2, a3); }

FORWARD(_cudaLibraryLoadData)
FORWARD(_cudaLibraryGetKernel)
FORWARD(_cuKernelGetAttribute)
FORWARD(_cudaKernelSetAttributeForDevice)
FORWARD(_cudaFuncSetAttribute)
FORWARD(_cudaDeviceGetAttribute)
FORWARD(_cudaGetDevice)
FORWARD(_cudaSetDevice)
FORWARD(_cudaGetDeviceCount)
FORWARD(_cudaLaunchKernelEx)
FORWARD(_cudaLibraryUnload)
FORWARD(_cudaStreamSynchronize)
FORWARD(_cudaDeviceSynchronize)
FORWARD(_cudaOccupancyMaxActiveBlocksPerMultiprocessor)
FORWARD(_cudaMemsetAsync)
FORWARD(_cudaMemset)

int _cudaLaunchKernel(void) { return 801; /* cudaErrorNotSupported: hosts use _cudaLaunchKernelEx */ }

int cuda_dialect_init_library_once(void **handle, int (*load)(void **), int (*load_on_device)(void **, int),
                                   void (*report)(const char *, const char *)) {
    (void)report;
    if (*handle) return 0;
    void *fresh = NULL;
    int status = load(&fresh);
    if (status) return status;
    if (load_on_device) status = load_on_device(&fresh, 0);
    if (status) return status;
    *handle = fresh;
    return 0;
}

void cuda_dialect_unload_library_once(void **handle) { *handle = NULL; }
const char *cuda_dialect_get_error_name(int status) { (void)status; return "error of the recording runtime"; }
void cuda_dialect_print_on_error(void) {}
void cuda_dialect_assert_success(void) {}
void CuteDSLRT_TVMFFISetRaisedCudaError(void) {}
void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(void) {}
