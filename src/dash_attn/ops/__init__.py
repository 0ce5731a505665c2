"""The torch operators under the public functions: backends, plans found by shape, and autograd."""
