//! The sources: who may name whom, which names are public, which features compile what.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod features;
mod layers;
mod public_names;
