/* Stand-in for libcuda.so.1 and libcudart.so on a machine without CUDA, for TileLang's host code.
 *
 * TileLang reaches CUDA through stub libraries that dlopen the real ones; loading this one first makes them find it.
 * Interesting calls go to one hook that Python installs; the rest succeed without effect. Signatures follow the CUDA
 * driver API and the runtime API. */
#include <stdint.h>
#include <stddef.h>
#include <string.h>

typedef int (*hook_t)(const char *name, uint64_t *arguments);
static hook_t hook;

void ptx_sim_set_driver_hook(hook_t function) { hook = function; }

static int call(const char *name, uint64_t *a) { return hook ? hook(name, a) : 100; }

#define FORWARD(name) \
    int name(uint64_t a0, uint64_t a1, uint64_t a2, uint64_t a3, uint64_t a4, uint64_t a5) { \
        uint64_t a[6] = {a0, a1, a2, a3, a4, a5}; return call(#name, a); }
#define SUCCEED(name) int name(void) { return 0; }

FORWARD(cuModuleLoadData)
FORWARD(cuModuleLoadDataEx)
FORWARD(cuModuleGetFunction)
FORWARD(cuModuleGetGlobal_v2)
FORWARD(cuLaunchKernelEx)
FORWARD(cuDeviceGetAttribute)
FORWARD(cudaDeviceGetAttribute)
FORWARD(cuMemsetD32_v2)

int cuModuleGetGlobal(uint64_t a0, uint64_t a1, uint64_t a2, uint64_t a3) {
    return cuModuleGetGlobal_v2(a0, a1, a2, a3, 0, 0);
}

int cuFuncSetAttribute(uint64_t function, int attribute, int value) {
    uint64_t a[3] = {function, (uint64_t)attribute, (uint64_t)value};
    return hook ? call("cuFuncSetAttribute", a) : 0;
}

static int launch(const char *name, uint64_t f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                  unsigned bz, unsigned shared, void **params) {
    uint64_t a[9] = {f, gx, gy, gz, bx, by, bz, shared, (uint64_t)params};
    return call(name, a);
}

int cuLaunchKernel(uint64_t f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **params, void **extra) {
    (void)stream; (void)extra;
    return launch("cuLaunchKernel", f, gx, gy, gz, bx, by, bz, shared, params);
}

int cuLaunchCooperativeKernel(uint64_t f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                              unsigned bz, unsigned shared, void *stream, void **params) {
    (void)stream;
    return launch("cuLaunchKernel", f, gx, gy, gz, bx, by, bz, shared, params);
}

int cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *address, const uint64_t *dims,
                           const uint64_t *strides, const unsigned *box, const unsigned *element_strides,
                           int interleave, int swizzle, int promotion, int fill) {
    uint64_t a[12] = {(uint64_t)map, (uint64_t)type, rank, (uint64_t)address, (uint64_t)dims, (uint64_t)strides,
                      (uint64_t)box, (uint64_t)element_strides, (uint64_t)interleave, (uint64_t)swizzle,
                      (uint64_t)promotion, (uint64_t)fill};
    return call("cuTensorMapEncodeTiled", a);
}

int cuTensorMapEncodeIm2col(void) { return 801; }
int cuGetErrorName(int error, const char **text) { (void)error; *text = "error of the recording driver"; return 0; }
int cuGetErrorString(int error, const char **text) { return cuGetErrorName(error, text); }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuCtxGetLimit(size_t *value, int limit) { (void)limit; *value = 0; return 0; }
int cuDeviceGetName(char *name, int length, int device) { (void)device; strncpy(name, "simulated", length); return 0; }
SUCCEED(cuInit)
SUCCEED(cuCtxSetLimit)
SUCCEED(cuCtxResetPersistingL2Cache)
SUCCEED(cuModuleUnload)
SUCCEED(cuStreamSetAttribute)

int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaMemset(void *p, int value, size_t n) { memset(p, value, n); return 0; }
int cudaMemsetAsync(void *p, int value, size_t n, void *stream) { (void)stream; memset(p, value, n); return 0; }
const char *cudaGetErrorString(int error) { (void)error; return "error of the recording runtime"; }
SUCCEED(cudaSetDevice)
SUCCEED(cudaGetLastError)
SUCCEED(cudaPeekAtLastError)
SUCCEED(cudaDeviceSynchronize)
SUCCEED(cudaStreamSynchronize)
SUCCEED(cudaFuncSetAttribute)
