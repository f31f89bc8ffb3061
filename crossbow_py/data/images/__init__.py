"""Images in folders: scanning, decoding, cropping and resizing them, and a cache of resized ones."""
