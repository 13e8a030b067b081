"""The devices on which workers compute, and the settings whose defaults depend on the device."""
