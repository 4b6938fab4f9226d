"""Access to the kernel, independent of jobs: an event loop, processes, memory and disks."""
