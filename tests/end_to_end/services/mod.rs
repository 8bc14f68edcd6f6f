//! Function servers and their clients, over real sockets.

mod cluster;

mod coordinating;
mod declaring;
mod ending;
mod failures;
mod fairness;
mod inputs;
mod kept;
mod local_job;
mod nesting;
mod placing;
mod proxy;
mod resending;
mod towers;
mod waits;
