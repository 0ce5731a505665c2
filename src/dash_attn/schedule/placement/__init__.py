"""Placements: orders in which workers claim items. They decide speed and never a bit."""
