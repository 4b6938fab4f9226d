"""Names that published scripts import from AWS's own tests."""
