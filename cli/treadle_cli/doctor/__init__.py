"""What ``treadle doctor`` finds out: plugins, devices, offers of backends, and advice."""
