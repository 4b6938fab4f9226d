"""`shoal report`: pictures and tables of what a job did, from the files it wrote, and of whose an image's bytes are."""
