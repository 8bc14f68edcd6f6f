//! Code for tests only.

pub mod adversary;
#[cfg(test)]
mod sim;
