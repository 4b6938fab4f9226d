"""What the kernel offers, without any notion of a job: an event loop, processes, memory and disks."""
