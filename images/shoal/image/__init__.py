"""The contents of an image: its layers, files and packages, their sizes and owners, and the commands about them."""
