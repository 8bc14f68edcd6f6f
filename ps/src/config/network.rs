//! The limits and waits of a server's connections.

use std::time::Duration;

/// How a server treats its connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Network {
    pub(crate) handshake_timeout: Duration,
    pub(crate) stall_timeout: Duration,
    pub(crate) busy_poll: Duration,
    pub(crate) connections_max: usize,
    pub(crate) waiting_connections_max: usize,
    pub(crate) shared_memory: bool,
}

impl Default for Network {
    fn default() -> Network {
        Network {
            handshake_timeout: Duration::from_secs(5),
            stall_timeout: Duration::from_secs(30),
            busy_poll: Duration::from_micros(50),
            connections_max: 4096,
            waiting_connections_max: 1024,
            shared_memory: true,
        }
    }
}

impl Network {
    /// The maximum for [`Network::waiting_connections_max`]: more than a process may have
    /// descriptors.
    pub const WAITING_CONNECTIONS_MAX: usize = 65_536;

    /// Sets the time limit for a peer's hello, regardless of how slowly it sends. A peer that
    /// exceeds it is disconnected. 100 ms to 10 minutes. Default 5 s.
    pub fn handshake_timeout(self, timeout: Duration) -> Self {
        Network { handshake_timeout: timeout, ..self }
    }

    /// Sets how long a peer may leave a frame partly sent or a response unread before its
    /// connection is closed. Also sets how long an update waits for memory pinned by a slow pull
    /// ([`Storage::pin_bytes_max`](crate::Storage::pin_bytes_max)) before that pull is cut off.
    /// Default 30 s.
    pub fn stall_timeout(self, timeout: Duration) -> Self {
        Network { stall_timeout: timeout, ..self }
    }

    /// Sets for how long a shard's thread polls its sockets at most before it sleeps. It polls only
    /// while peers have come within that time again and again, and no other thread wants the
    /// processor: it yields the processor while it polls, and stops polling for 50 to 800 ms if
    /// others go on taking it.
    ///
    /// On an idle host polling costs at most one processor per shard while requests follow each
    /// other, and saves the wake-up of some 20 us per request. On a busy host the thread does not
    /// poll. Zero switches polling off. Default 50 us.
    pub fn busy_poll(self, longest: Duration) -> Self {
        Network { busy_poll: longest, ..self }
    }

    /// Sets the maximum number of connections per shard. Default 4096.
    pub fn connections_max(self, connections: usize) -> Self {
        Network { connections_max: connections, ..self }
    }

    /// Sets the maximum number of connections of the task without a hello. When one more arrives,
    /// the oldest connection from the address with the most of them is closed; the new one counts.
    /// All connections through Unix sockets count as one address, and so does each IPv6 /64
    /// network. Each waiting connection costs a descriptor and a few KiB. One is also closed when
    /// the process has no descriptors left. [`crate::Metrics`] counts the evictions.
    ///
    /// A client that has said hello is never evicted. If the limit exceeds the number of clients
    /// that connect at once, none of them is evicted before its hello either. 1 to
    /// [`Network::WAITING_CONNECTIONS_MAX`]. Default 1024.
    pub fn waiting_connections_max(self, connections: usize) -> Self {
        Network { waiting_connections_max: connections, ..self }
    }

    /// Sets whether clients that connect through a Unix socket as the same user get shared memory.
    /// They map the values read-only and pull them without a request. Each client costs a page of
    /// memory, and the shard 8 bytes per block. The values are then in memory with a descriptor,
    /// which gets huge pages only where the system grants them to such memory (`shmem_enabled`). A
    /// client with shared memory can read all values, as it could before through pulls: the user is
    /// the security boundary.
    ///
    /// Such workers can also get push buffers, shared memory in which they write gradients in
    /// place. A push buffer takes the memory of two pushes, charged to the memory limit, and one
    /// more push for each of its slots once the worker also sends parts over the connection. At
    /// most 64 workers per shard have one. The NaN check there runs while the gradient is applied,
    /// or before it is held for a synchronous step. NaN that a worker writes after the check enters
    /// the training, like any other wrong gradient. The contents are lost with the server process,
    /// and workers resend them. In [`crate::Mode::Synchronous`] shards acknowledge a gradient as
    /// held before it is applied, so a server with [`crate::Storage::directory`] shares no push
    /// buffers there.
    ///
    /// Nothing is shared with [`crate::Durability::Power`], where readers would see values that are
    /// not on disk yet, nor with [`crate::StalenessPolicy::DelayCompensation`], which must keep
    /// what each client has read. Linux only. Default true.
    pub fn shared_memory(self, shared: bool) -> Self {
        Network { shared_memory: shared, ..self }
    }
}
