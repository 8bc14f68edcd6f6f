//! The messages of the protocol: one struct for each kind, by subject, and the enum of all kinds.

mod administration;
mod checkpoints;
mod clusters;
mod coordinators;
mod pulls;
mod pushes;
mod rings;
mod services;
mod sessions;
mod sharing;
mod steps;
mod tokens;
mod variables;

use super::error::ProtocolError;
use super::feature::Features;
use super::limits;
use super::wire::{FeatureSink, FieldReader, Wire};
pub use administration::*;
pub use checkpoints::*;
pub use clusters::*;
pub use coordinators::*;
pub use pulls::*;
pub use pushes::*;
pub use rings::*;
pub use services::*;
pub use sessions::*;
pub use sharing::*;
pub use steps::*;
pub use tokens::*;
pub use variables::*;

macro_rules! messages {
    ($($kind:literal => $name:ident, body $limit:expr;)*) => {
        /// Any message of the protocol.
        #[derive(Clone, Debug, PartialEq)]
        #[allow(missing_docs, reason = "each variant is the struct of the same name")]
        #[non_exhaustive]
        pub enum Message {
            $($name($name),)*
        }

        impl Message {
            const HELLO: u16 = 1;

            /// Every kind that exists, in ascending order.
            pub const KINDS: &'static [u16] = &[$($kind),*];

            /// Returns the code of the message in the header.
            pub fn kind(&self) -> u16 {
                match self {
                    $(Message::$name(_) => $kind,)*
                }
            }

            /// Returns the name of the message.
            pub fn name(&self) -> &'static str {
                match self {
                    $(Message::$name(_) => stringify!($name),)*
                }
            }

            /// Returns the largest body of a message of this kind; `None` for an unknown kind.
            pub fn body_limit(kind: u16) -> Option<u64> {
                match kind {
                    $($kind => Some($limit),)*
                    _ => None,
                }
            }

            /// Appends the meta for a peer with which these features are agreed.
            pub fn put(&self, features: Features, bytes: &mut Vec<u8>) {
                let out = &mut FeatureSink { bytes, features };
                match self {
                    $(Message::$name(fields) => fields.put(out),)*
                }
            }

            /// Decodes the meta of a message of this kind, from a peer with which these features
            /// are agreed.
            ///
            /// Bytes behind the last field of a `Hello` are ignored: they are fields of a newer
            /// client, which cannot know its server yet.
            pub fn take(
                kind: u16,
                features: Features,
                meta: &[u8],
            ) -> Result<Message, ProtocolError> {
                match kind {
                    $($kind => {
                        let mut reader = FieldReader::new(stringify!($name), meta).with(features);
                        let fields = $name::take(&mut reader)?;
                        if kind != Message::HELLO {
                            reader.finish()?;
                        }
                        Ok(Message::$name(fields))
                    })*
                    found => Err(ProtocolError::Kind { found }),
                }
            }
        }

        $(impl From<$name> for Message {
            fn from(fields: $name) -> Message {
                Message::$name(fields)
            }
        })*
    };
}

messages! {
    1 => Hello, body 0;
    2 => Welcome, body 0;
    3 => Refused, body 0;
    4 => Heartbeat, body 0;
    5 => HeartbeatAnswer, body 0;
    6 => ShareValues, body 0;
    7 => SharedValues, body 0;
    8 => SharePushBuffer, body 0;
    9 => SharedPushBuffer, body 0;
    10 => Declare, body limits::CATALOGUE_BYTES_MAX;
    11 => Declared, body 0;
    12 => Initialize, body 0;
    13 => AwaitReady, body 0;
    14 => Ready, body 0;
    15 => FetchCatalogue, body 0;
    16 => CatalogueIs, body limits::CATALOGUE_BYTES_MAX;
    17 => FindCheckpoint, body 0;
    18 => CheckpointFound, body 0;
    19 => Restore, body 0;
    20 => TokenRequest, body 0;
    21 => Granted, body 0;
    22 => Ended, body 0;
    23 => ReturnToken, body 0;
    24 => Returned, body 0;
    25 => PassedOverQuery, body 0;
    26 => PassedOverAre, body 0;
    27 => DeclareData, body 0;
    28 => DataDeclared, body 0;
    29 => SkipBatch, body 0;
    30 => Reserve, body 0;
    31 => Reserved, body 0;
    32 => PushPart, body limits::PART_BYTES_MAX;
    33 => PushAnswer, body 0;
    34 => Withdraw, body 0;
    35 => OutcomeQuery, body 0;
    36 => OutcomeIs, body 0;
    37 => PushEncoded, body limits::PART_BYTES_MAX;
    38 => PushShared, body 0;
    40 => Pull, body 0;
    41 => Pulled, body limits::PART_BYTES_MAX;
    42 => PullRows, body limits::PART_BYTES_MAX;
    43 => Rows, body limits::PART_BYTES_MAX;
    44 => PullEncoded, body 0;
    45 => PulledEncoded, body limits::PART_BYTES_MAX;
    46 => PullRowsEncoded, body limits::PART_BYTES_MAX;
    48 => PrepareRestore, body 0;
    49 => RestorePrepared, body 0;
    50 => Finish, body 0;
    51 => Finished, body 0;
    52 => Leave, body 0;
    53 => Left, body 0;
    54 => Save, body limits::USER_BLOB_BYTES_MAX;
    55 => Saved, body 0;
    56 => SaveShard, body 0;
    57 => ShardSaved, body limits::CATALOGUE_BYTES_MAX;
    58 => AwaitEnd, body 0;
    59 => AuditPushes, body 0;
    60 => Held, body 0;
    61 => StepApplied, body 0;
    62 => Commit, body 0;
    63 => TokenOver, body 0;
    64 => KeepCut, body 0;
    65 => Recall, body 0;
    66 => Recalled, body 0;
    67 => ChiefIs, body 0;
    68 => Goodbye, body 0;
    69 => PushesAudited, body 0;
    70 => OpenCoordinator, body 0;
    71 => CoordinatorIs, body 0;
    72 => CoordinatorQuery, body 0;
    73 => CloseCoordinator, body 0;
    74 => CoordinatorClosed, body 0;
    75 => EffectPart, body limits::PART_BYTES_MAX;
    76 => EffectEncoded, body limits::PART_BYTES_MAX;
    77 => EffectShared, body 0;
    78 => Challenge, body 0;
    79 => ChallengeAnswer, body 0;
    80 => ServerIs, body 0;
    81 => Describe, body 0;
    82 => Described, body limits::PART_BYTES_MAX;
    83 => Call, body limits::PART_BYTES_MAX;
    84 => InputPart, body limits::PART_BYTES_MAX;
    85 => CallEnded, body limits::PART_BYTES_MAX;
    86 => OutputPart, body limits::PART_BYTES_MAX;
    87 => CancelCall, body 0;
    88 => FetchOutput, body 0;
    89 => Fetched, body limits::PART_BYTES_MAX;
    90 => Release, body 0;
    91 => Released, body 0;
    96 => RingJoin, body 0;
    97 => RingWaits, body 0;
    98 => RingMember, body 0;
    99 => RingFormed, body 0;
    100 => RingJoiners, body 0;
    101 => RingOver, body 0;
    102 => RingLink, body 0;
    103 => RingLinked, body 0;
    104 => RingOperation, body 0;
    105 => RingPart, body limits::PART_BYTES_MAX;
    106 => RingEntered, body 0;
    107 => RingMoved, body 0;
    112 => RegisterTask, body 0;
    113 => ClusterWaits, body 0;
    114 => ClusterIs, body limits::CLUSTER_BYTES_MAX;
    116 => StatusQuery, body 0;
    117 => StatusIs, body 0;
    118 => Stop, body 0;
    119 => Stopping, body 0;
}
