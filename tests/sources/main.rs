//! The sources: who may name whom, which names are public, which features compile what,
//! and what a release build leaves out.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod crates;
mod error_texts;
mod features;
mod layers;
mod macro_expansion;
mod public_names;
#[cfg(target_os = "linux")]
mod release_daemon;
mod security_page;
