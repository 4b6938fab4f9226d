"""This machine, as builds need to know it: certificates, proxies, mirrors, and what of them answers."""
