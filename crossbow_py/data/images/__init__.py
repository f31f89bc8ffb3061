"""Images in folders: which there are, how they are decoded, cropped and resized, and the cache of resized ones."""
