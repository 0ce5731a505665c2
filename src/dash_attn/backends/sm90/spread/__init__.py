"""The forward over a cache of keys for few sequences: the keys of a segment are spread over many blocks."""
