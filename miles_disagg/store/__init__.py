"""The version store: pointer, lineage, publication, leases."""
