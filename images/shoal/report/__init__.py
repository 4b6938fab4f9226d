"""Reports as HTML pages and tables: timelines of jobs, sizes of images."""
