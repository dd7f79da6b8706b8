//! Kernel features and permissions: found or not, and what to do.
