"""The parts that data parallel and model parallel training share; frameworks are imported only below `core`."""
