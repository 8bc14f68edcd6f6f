//! End-to-end tests: real servers, workers and clients over real sockets, in one process.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod bad_input;
mod bounds;
mod checkpoints;
mod classic_rows;
mod clipping;
mod cluster;
mod codecs;
mod counts;
mod data;
mod dense_by_ring;
mod effects;
mod exactness;
mod example_custom_rule;
mod example_hello;
mod example_multi_device;
mod example_towers;
mod example_trainer;
mod first_values;
mod growth;
mod half_rows;
mod halves;
mod hostile;
#[cfg(target_os = "linux")]
mod interrupts;
mod lifecycle;
mod newcomers;
mod overlap;
mod panics;
mod placement;
mod proxy;
#[cfg(target_os = "linux")]
mod push_buffers;
mod reconnect;
mod recovery;
mod replication;
mod restart;
mod ring_checkpoints;
mod row_codecs;
mod rows;
mod rules;
mod secured;
mod services;
mod settings;
#[cfg(target_os = "linux")]
mod shared_values;
mod slow_reader;
mod staleness;
mod status;
mod streaming_sessions;
mod synchronous;
mod tables;
mod training;
mod training_end;
mod verbs;
mod whole_variables;
