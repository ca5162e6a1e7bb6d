"""Measurements that write JSON; `plots` reads JSON and never measures."""
