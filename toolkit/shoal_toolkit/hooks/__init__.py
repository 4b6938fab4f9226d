"""Code that runs inside other Python processes of a job, from shoal-toolkit.pth: see docs/hooks.md."""
