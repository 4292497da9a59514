"""What a layer point costs: work counted from its geometry, time fitted to a device."""
