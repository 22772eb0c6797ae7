"""Programs that show the package at work; each runs on a CPU and, unchanged, on a GPU."""
