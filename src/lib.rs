//! pushpull.
