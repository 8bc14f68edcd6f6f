//! Planted bugs, which prove that the tests would find such bugs.
//!
//! The feature `planted` compiles them into builds with debug assertions; a value passed in then
//! selects one. In every other build [`PlantedBugs::has`] is `false` at compile time.

/// Defines the bugs and the list of all bugs in one place.
macro_rules! bugs {
    ($($(#[$doc:meta])+ $bug:ident,)+) => {
        /// A plausible bug.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Bug {
            $($(#[$doc])+ $bug,)+
        }

        impl Bug {
            /// All bugs.
            pub const ALL: &[Bug] = &[$(Bug::$bug),+];
        }
    };
}

bugs! {
    /// A response is sent before its effect is committed.
    AcknowledgeBeforeCommit,
    /// The push window and the step are committed before the blocks.
    SequenceBeforeFlip,
    /// A restarted client is mistaken for its older incarnation.
    NoIncarnation,
    /// Non-temporal stores are not fenced before a word names their data.
    MissingFence,
    /// Data is not flushed before the words that name it.
    SkipFsync,
    /// A recovery that was killed is not repeated.
    RecoveryNotIdempotent,
    /// An outcome leaves the push window while its push may still be resent.
    EvictLiveOutcome,
    /// Rows are changed before their old contents are saved.
    UndoAfterWrite,
    /// Blocks are reused before the commit that frees them.
    ReuseBeforeCommit,
    /// The tokens of a lost replica are never granted again.
    KeepLostTokens,
    /// A push is admitted once a single shard holds it.
    AdmitBeforeWhole,
    /// Admissions are not restored after a restart.
    ForgetAdmissions,
    /// A shard applies a step once it has enough pushes, without the step owner's decision.
    CommitAlone,
    /// The sum of a step's gradients is divided by the configured number of gradients, not by the
    /// actual number.
    MeanOfAll,
    /// A push is attributed to the token last granted to its replica, not to its own token.
    KeyByReplica,
    /// A fenced incarnation of a client is accepted again.
    StaleEpoch,
    /// A chief continues after a newer one has connected.
    StaleChief,
    /// A step begins while a shard has not yet applied the previous one.
    BeginEarly,
    /// A block that a reader pins in shared memory is overwritten.
    PinIgnored,
    /// A reader in shared memory that is too slow, or whose connection is closed, is not told that
    /// its pin was revoked.
    RevokedUnseen,
    /// Readers in shared memory see the changes of a commit only after the next commit.
    StaleSequence,
    /// A lost client's token is taken back in asynchronous mode before the other shards are asked.
    TakeBackUnasked,
    /// A client that has reconnected sends a push to all shards at once, without waiting for the
    /// step owner. Not a bug of a server: planted in the simulator's clients.
    OwnerNotAsked,
    /// A client writes its next gradients into a buffer slot before the previous push there is
    /// settled. Not a bug of a server: planted in the simulator's clients.
    SlotReusedEarly,
    /// The batch of a token whose gradient is stale is not granted again.
    KeepStaleBatch,
    /// A batch counts as spent in a checkpoint before the commit of its gradient.
    SpendBatchEarly,
    /// A restore does not go back to the data position of the checkpoint.
    PositionNotRestored,
    /// A batch that was given back is granted to two tokens.
    GrantReturnedBatchTwice,
    /// A push that is applied does not settle its effect.
    EffectNotRecorded,
    /// A push that is applied settles all effects before its own, too.
    EffectWatermarkAhead,
    /// A push slot that gives its memory back keeps it off the budget.
    KeepSlotReservation,
}

/// The planted bug, if any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PlantedBugs {
    #[cfg(all(feature = "planted", debug_assertions))]
    bug: Option<Bug>,
}

#[cfg(all(feature = "planted", debug_assertions))]
impl PlantedBugs {
    /// Plants this bug.
    pub fn with(bug: Bug) -> PlantedBugs {
        PlantedBugs { bug: Some(bug) }
    }

    /// Returns the planted bug, if any.
    pub fn bug(self) -> Option<Bug> {
        self.bug
    }

    /// Returns whether this bug is planted.
    #[inline]
    pub fn has(self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }
}

#[cfg(not(all(feature = "planted", debug_assertions)))]
impl PlantedBugs {
    /// Returns false: no bug is compiled in.
    #[inline]
    pub fn has(self, _bug: Bug) -> bool {
        false
    }
}
