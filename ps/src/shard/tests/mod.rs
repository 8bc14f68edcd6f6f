//! Unit tests of the shard state machine: scripted scenarios and random runs.

mod accounts;
mod actors;
mod arenas;
mod bounds;
mod calls;
mod chiefs;
mod claims;
mod clipping;
mod corruption;
mod crash_life;
mod crash_model;
mod cuts;
mod data;
mod encoded;
mod encoded_rows;
mod events;
mod forged;
mod growth;
mod handshakes;
mod images;
mod join;
mod kept;
mod members;
mod model;
mod numbers;
mod overflows;
mod page;
mod peers;
#[cfg(feature = "planted")]
mod planted;
mod policies;
mod power;
mod pulls;
mod push_buffers;
mod push_buffers_synchronous;
mod push_slots;
mod pushes;
mod random;
mod recalls;
mod refusals;
mod resends;
mod restores;
mod rows;
#[cfg(target_os = "linux")]
mod shared_values;
mod spending;
mod staleness;
mod status;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod step_scans;
mod stepping;
mod synchronous;
mod talk;
mod tokens;
mod training_end;
mod world;
