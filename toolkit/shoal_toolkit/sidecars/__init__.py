"""Programs of their own beside the launcher, which may take memory and import boto3: code, packages, uploads."""
