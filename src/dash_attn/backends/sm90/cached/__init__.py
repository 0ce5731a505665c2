"""The forward over a cache of keys whose lengths are on the device."""
