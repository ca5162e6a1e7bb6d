"""Data sources: one file per dataset format, all with the interface of `base.Source`."""
