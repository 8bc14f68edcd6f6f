//! Why a server cannot listen on an address.

use std::io;

use thiserror::Error;

/// An error that prevents a server from listening.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ListenError {
    /// The address is not `host:port`, `[v6]:port` or `unix:/path`.
    #[error("cannot listen on {address:?}: it is not host:port or unix:/path")]
    Address {
        /// The requested address.
        address: String,
    },
    /// Other machines can reach the address, and the server would let in everybody.
    #[error(
        "cannot listen on {address}: other machines can reach it, and everybody would be let in; give \
         it a certificate, and access tokens or an authority; listen on loopback or a Unix socket; or \
         opt in to insecure listening"
    )]
    Exposed {
        /// The requested address.
        address: String,
    },
    /// The address is in use.
    #[error("cannot listen on {address}: it is in use")]
    InUse {
        /// The requested address.
        address: String,
    },
    /// The path of a Unix socket belongs to something else, which a server does not remove.
    #[error("cannot listen on {address}: a {found} has this path; remove it, or give another path")]
    Occupied {
        /// The requested address.
        address: String,
        /// The kind of thing that has the path, such as a file.
        found: &'static str,
    },
    /// The name means addresses that this machine does not have, such as that of a load balancer or of
    /// another machine.
    #[error(
        "cannot listen on {address}: it is {found}, no address of this machine; listen on one that it \
         has, or on 0.0.0.0"
    )]
    Elsewhere {
        /// The requested address.
        address: String,
        /// The address that it means here.
        found: std::net::IpAddr,
    },
    /// The operating system returned an error.
    #[error("cannot listen on {address}")]
    Io {
        /// The requested address.
        address: String,
        /// The error.
        source: io::Error,
    },
}
