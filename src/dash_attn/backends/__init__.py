"""Backends: what runs a plan. ``base`` says what each of them covers."""
