"""The network settings of this machine, which builds use too: package indexes, mirrors, proxies, certificates."""
