//! The events of access to a server: denials, revocations and unusable files.

use std::fmt;

use crate::ids::TaskId;
use crate::protocol::message::Role;

/// Something about who may connect to a server.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AccessEvent {
    /// Peers have not proved that they may connect. Reported for the first attempt of a host, and then
    /// every ten seconds at most.
    Denied(DeniedPeer),
    /// A connection was closed because what had let its peer in was taken back.
    Revoked {
        /// The name of the access token or of the certificate.
        principal: String,
    },
    /// A peer that has proved who it is was refused: it has as many connections as its entry allows.
    /// Reported every ten seconds at most.
    Full {
        /// The name of the access token or of the certificate.
        principal: String,
        /// The number of connections.
        limit: u32,
    },
    /// The files of the credentials have changed and cannot be used. What they said before holds.
    Unusable {
        /// Why, with the file.
        cause: String,
    },
}

/// An attempt to connect that has failed for want of proof.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeniedPeer {
    /// Its address, without a port and, of IPv6, without the last 64 bits; `this host` for a Unix
    /// socket.
    pub host: String,
    /// The role in which it wanted to connect, and the task that it claims to be; `None` if it has
    /// not said so yet.
    pub claim: Option<(Role, TaskId)>,
    /// The reason, which the peer itself is not told.
    pub cause: String,
    /// The attempts of this host that have failed since the last report, with this one.
    pub attempts: u64,
}

impl DeniedPeer {
    /// Describes the attempts of a host.
    pub fn new(
        host: String,
        claim: Option<(Role, TaskId)>,
        cause: String,
        attempts: u64,
    ) -> DeniedPeer {
        DeniedPeer { host, claim, cause, attempts }
    }
}

impl AccessEvent {
    /// Returns a short name of the kind, for counting and filtering.
    pub fn kind(&self) -> &'static str {
        match self {
            AccessEvent::Denied(_) => "peer-denied",
            AccessEvent::Revoked { .. } => "peer-revoked",
            AccessEvent::Full { .. } => "peer-limited",
            AccessEvent::Unusable { .. } => "credentials-unusable",
        }
    }
}

impl fmt::Display for AccessEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AccessEvent::Denied(peer) => peer.fmt(f),
            AccessEvent::Revoked { principal } => {
                write!(f, "closed a connection of {principal}, which may not connect any more")
            }
            AccessEvent::Full { principal, limit } => {
                write!(f, "refused a connection of {principal}, which has {limit}")
            }
            AccessEvent::Unusable { cause } => {
                write!(f, "the credentials are those of before: {cause}")
            }
        }
    }
}

impl fmt::Display for DeniedPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DeniedPeer { host, claim, cause, attempts } = self;
        match claim {
            // A stranger has chosen the name of the job.
            Some((role, task)) => {
                let claim = format!("{role:?} {task}");
                write!(f, "{}", claim.escape_debug())?;
            }
            None => f.write_str("a peer")?,
        }
        write!(f, " from {host} may not connect: {cause}")?;
        match attempts {
            1 => Ok(()),
            attempts => write!(f, "; {attempts} attempts"),
        }
    }
}
