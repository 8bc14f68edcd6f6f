//! How a session opens, is kept alive, and ends.

use super::variables::CatalogueState;
use crate::codec::Encodings;
use crate::ids::{ClientEpoch, GlobalStep, Incarnation, RestoreEpoch, ShardId};
use crate::protocol::feature::Features;
use crate::protocol::limits;
use crate::protocol::refusal::Refusal;
use crate::protocol::version;
use crate::protocol::wire::{List, Text, wire_enum, wire_struct};

/// An identity on the wire: names and values, in order of names.
pub type IdentityFields = List<
    (Text<{ limits::IDENTITY_NAME_BYTES_MAX }>, Text<{ limits::IDENTITY_VALUE_BYTES_MAX }>),
    { limits::IDENTITY_FIELDS_MAX },
>;

wire_enum! {
    /// What a peer may do; checked for every message.
    #[derive(Copy, Eq)]
    Role {
        /// Takes tokens, pulls and pushes.
        1 => Worker {},
        /// A worker that also declares and initializes the variables and ends training.
        2 => Chief {},
        /// Only pulls, without tokens; holds no lease.
        3 => Reader {},
        /// Administers a training: asks for its status, saves, finishes and stops; holds no lease.
        4 => Admin {},
        /// Another ps task.
        5 => Peer {},
        /// Calls named functions; holds no lease.
        6 => Client {},
        /// A member of a ring.
        7 => Rank {},
        /// A task that registers at the rendezvous of its cluster.
        8 => Task {},
    }
}

impl Role {
    /// Returns the role's code on the wire.
    pub const fn code(self) -> u8 {
        match self {
            Role::Worker {} => 1,
            Role::Chief {} => 2,
            Role::Reader {} => 3,
            Role::Admin {} => 4,
            Role::Peer {} => 5,
            Role::Client {} => 6,
            Role::Rank {} => 7,
            Role::Task {} => 8,
        }
    }

    /// Returns whether the role is a member: it holds a lease and may push.
    pub fn is_member(self) -> bool {
        matches!(self, Role::Worker {} | Role::Chief {})
    }
}

wire_enum! {
    /// Whether bodies have a checksum.
    #[derive(Copy, Eq)]
    BodyCrc {
        /// Every body has one.
        1 => On {},
        /// Bodies have none.
        2 => Off {},
        /// In a request: the server decides by the transport.
        3 => Auto {},
    }
}

wire_enum! {
    /// The update mode of a shard.
    #[derive(Copy, Eq)]
    ModeIs {
        /// Each push is applied at once.
        1 => Asynchronous {
            /// Whether the step owner drops stale gradients. A client then sends the last part to
            /// the other shards only after the owner has applied the push.
            owner_first: bool,
        },
        /// A step combines several pushes.
        2 => Synchronous {
            /// The number of gradients in a step.
            replicas_to_aggregate: u32,
            /// The expected number of replicas, backup replicas included.
            total_num_replicas: u32,
        },
    }
}

wire_enum! {
    /// The handling of NaN and infinities in a push.
    #[derive(Copy, Eq)]
    NonFinitePolicy {
        /// The push is refused: by the worker before a byte is sent, and again by the server.
        1 => Reject {},
        /// The push is applied and the server counts it.
        2 => Count {},
        /// No check.
        3 => Allow {},
    }
}

wire_struct! {
    /// The features of the side that says hello.
    #[derive(Copy, Eq, Default)]
    FeatureOffer {
        /// The features that it has. The other side ignores unknown bits.
        has: Features,
        /// Those without which it cannot work: a side that lacks one refuses by its number.
        requires: Features,
    }
}

impl FeatureOffer {
    /// Offers these features and requires none.
    pub fn of(has: Features) -> FeatureOffer {
        FeatureOffer { has, requires: Features::NONE }
    }
}

wire_struct! {
    /// The access token by which a client will prove who it is. What it proves is never sent.
    #[derive(Eq)]
    AuthOffer {
        /// The name of the token.
        token: Text<{ limits::ACCESS_TOKEN_NAME_BYTES_MAX }>,
        /// Random bytes of the client, new for each connection.
        nonce: [u8; 32],
    }
}

wire_struct! {
    /// Opens a session with one shard. A later version may append fields: a server ignores bytes
    /// behind the last field that it knows.
    Hello {
        /// The oldest protocol version that the client speaks.
        version_oldest: u16,
        /// The newest protocol version that the client speaks.
        version_newest: u16,
        /// The role that the client requests.
        role: Role,
        /// The client's job.
        job: Text<{ limits::JOB_BYTES_MAX }>,
        /// The client's task index.
        task: u32,
        /// The shard that the session is for.
        shard: ShardId,
        /// Chosen by the client at each start.
        incarnation: Incarnation,
        /// The epoch assigned to this incarnation; 0 requests one from the step owner.
        client_epoch: ClientEpoch,
        /// The restore epoch that the client has joined on this shard; 0 before.
        seen_epoch: RestoreEpoch,
        /// The newest global step known to the client.
        seen_step: GlobalStep,
        /// The state in which that epoch began, from the welcome of the shard; 0 before.
        seen_arena: u64,
        /// SHA-256 of the client's catalogue; absent before it has joined.
        catalogue: Option<[u8; 32]>,
        /// Whether the client requests checksums for bodies.
        body_crc: BodyCrc,
        /// The facts that must agree, as known to the client.
        identity: IdentityFields,
        /// The access token that the client has, if it has one. A server that authenticates clients
        /// then answers with a [`Challenge`], and one that does not refuses it.
        auth: Option<Box<AuthOffer>>,
        /// The client's features.
        features: FeatureOffer,
    }
}

impl Hello {
    /// Returns the version that a server with these features and the client agree on.
    ///
    /// # Errors
    /// The refusal of a client that demands what the server does not have: a version, a feature or
    /// authentication.
    pub fn agree(&self, has: Features) -> Result<u16, Refusal> {
        let version = version::agree(self.version_oldest, self.version_newest)
            .ok_or(Refusal::Version { oldest: version::OLDEST, newest: version::NEWEST })?;
        if let Some(number) = has.first_missing(self.features.requires) {
            return Err(Refusal::Feature { number, has });
        }
        match self.auth.as_ref().map(|offer| &offer.token) {
            None => Ok(version),
            // A client that authenticates must not believe that it was understood.
            Some(token) => Err(Refusal::Unsupported {
                kind: 1,
                detail: Text::clipped(format!(
                    "this server does not authenticate clients, and this one has the access token \
                     {token}"
                )),
            }),
        }
    }
}

wire_struct! {
    /// Accepts a session.
    Welcome {
        /// The protocol version of the session.
        version: u16,
        /// The number of shards of each ps task.
        shards: u16,
        /// The client's epoch, assigned by the step owner or repeated by another shard.
        client_epoch: ClientEpoch,
        /// The update mode.
        mode: ModeIs,
        /// The lease: a member that is silent for this long is lost.
        lease_ms: u32,
        /// The largest part that the shard accepts.
        part_bytes_max: u32,
        /// Whether bodies have checksums in this session: `On` or `Off`.
        body_crc: BodyCrc,
        /// The handling of non-finite values.
        non_finite: NonFinitePolicy,
        /// The encodings that the shard can decode; those of values it can also encode.
        encodings: Encodings,
        /// The state of the variables.
        catalogue: CatalogueState,
        /// The restore epoch. It rises when the cluster restores a checkpoint or is initialized
        /// again; 0 before the variables of this shard have had values.
        restore_epoch: RestoreEpoch,
        /// The global step at which that epoch began.
        restored_step: GlobalStep,
        /// The random id of the shard's state. Another one means that the state was lost. An epoch
        /// of a lost state is none of its successor's, although both may have one number.
        arena: u64,
        /// The address of a Unix socket of the same server, in the form of a cluster's addresses;
        /// empty if there is none. There the server shares memory with clients of its host and
        /// user. A client that is connected in another way may connect there instead.
        unix_address: Text<{ limits::UNIX_ADDRESS_BYTES_MAX }>,
        /// The facts that must agree, as known to the server.
        identity: IdentityFields,
        /// The server's features. Those that the client has too are agreed.
        features: Features,
    }
}

wire_struct! {
    /// Answers a hello that names an access token: the server proves that it knows it, and asks the
    /// client to.
    Challenge {
        /// Random bytes of the server, new for each connection.
        nonce: [u8; 32],
        /// The server's proof.
        proof: [u8; 32],
    }
}

wire_struct! {
    /// Answers a challenge. The server then answers the hello.
    ChallengeAnswer {
        /// The client's proof.
        proof: [u8; 32],
    }
}

wire_struct! {
    /// Answers any request with a refusal.
    Refused {
        /// The reason.
        refusal: Refusal,
    }
}

wire_struct! {
    /// Renews a lease. Any byte does; a heartbeat is for times without other traffic.
    Heartbeat {}
}
wire_struct! {
    /// Answers a heartbeat, so that the client knows that the server is alive.
    HeartbeatAnswer {}
}

wire_struct! {
    /// Ends the training: no client gets another token (chief).
    Finish {}
}
wire_struct! {
    /// The training has ended.
    Finished {}
}
wire_struct! {
    /// Waits for the end of the training on all workers. A worker that sends it has settled its
    /// pushes and takes no more tokens. `Ended` answers it.
    AwaitEnd {}
}
wire_struct! {
    /// Leaves the training and returns this client's tokens.
    Leave {}
}
wire_struct! {
    /// The client has left; the connection may close.
    Left {}
}
wire_struct! {
    /// The server stops and will not come back. It answers no request.
    Goodbye {}
}
