"""The pages of docs/reference: one module writes one page, from the code and its data."""
