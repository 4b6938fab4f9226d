"""What is inside an image, as its container says: a bill of materials, a manifest, whether the tag tells the truth."""
