"""Sources: files, here or in an object store, whose samples are read by index, block by block."""
