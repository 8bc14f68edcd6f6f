//! The transport that servers and workers share.
//!
//! [`Stream`] is a TCP connection or a Unix socket. [`FrameStream`] receives the frames of one, and
//! [`SendQueue`] sends frames. [`Endpoints`] are bound addresses, and [`accept`] takes the peers
//! that connect to them. A [`Connector`] connects to a server. [`AdaptiveSpin`] decides whether a
//! waiting thread polls or sleeps, and [`timed_yield`] tells it whether another thread wants the
//! processor. [`PipeReader`] and [`PipeWriter`] pass bytes through memory that two processes share.
//! A [`ClusterRendezvous`] gathers the addresses of a cluster by the same frames, and a
//! [`TaskRegistration`] is a task's side of it.
//! An internal crate of pushpull: its API may change with any version.

mod accept;
mod adaptive_spin;
pub mod auth;
mod cluster_rendezvous;
mod connect_race;
mod connector;
mod contention;
mod endpoints;
mod frame_stream;
mod home_process;
mod listen_error;
mod open_files;
mod private_folder;
mod readiness;
mod send_queue;
mod shared_pipe;
mod socket_path;
mod stream;
mod task_registration;
#[cfg(test)]
mod tests;
mod timed_yield;
#[cfg(feature = "tls")]
mod tls;
#[cfg(not(feature = "tls"))]
#[path = "tls/absent.rs"]
mod tls;
mod waiting;

pub use accept::{
    AcceptLimits, ArrivedPeer, ClaimedTask, NoHello, PeerReceiver, ServicePeers, accept,
};
pub use adaptive_spin::{AdaptiveSpin, SpinLimits, SpinWait};
pub use cluster_rendezvous::ClusterRendezvous;
pub use connect_race::AttemptEnd;
pub use connector::{ConnectError, Connected, Connector};
pub use endpoints::Endpoints;
pub use frame_stream::{ConnectionPhase, ConnectionSide, FrameStream};
pub use home_process::HomeProcess;
pub use listen_error::ListenError;
pub use open_files::{
    DescriptorShortage, is_out_of_descriptors, open_files_limit, raise_open_files_limit,
};
pub use private_folder::enter_private_folder;
pub use readiness::Readiness;
pub use send_queue::{SendBody, SendQueue};
pub use shared_pipe::{PipeReader, PipeWriter};
pub use stream::{DetachedStream, Stream, StreamAddresses};
pub use task_registration::{RegisterError, RegisteredTask, TaskRegistration};
pub use timed_yield::timed_yield;
#[cfg(feature = "tls")]
pub use tls::TlsFileError;
