//! Where a peer connects from.

/// Where a peer connects from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerOrigin {
    /// Possibly another host.
    Remote,
    /// This host, over TCP.
    Loopback,
    /// This host, over a Unix socket, which can pass descriptors.
    Unix {
        /// Whether the peer has the same user id as this process.
        same_user: bool,
    },
}
