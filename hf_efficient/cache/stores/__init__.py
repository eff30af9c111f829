"""Where the pages of a layer lie, in which format."""
