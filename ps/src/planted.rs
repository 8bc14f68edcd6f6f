//! Planted bugs, so that it can be seen that the tests would find them.
//!
//! Only with the feature `planted` are they compiled in, and then one is chosen by a value that is
//! passed in. Without it [`PlantedBugs::has`] is `false` at compile time.

/// Writes the bugs down once, so that none can be missing where all of them are named.
macro_rules! bugs {
    ($($(#[$doc:meta])+ $bug:ident,)+) => {
        /// A bug that somebody could have written.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[cfg_attr(
            not(feature = "planted"),
            allow(dead_code, unreachable_pub, reason = "chosen with the feature only")
        )]
        #[non_exhaustive]
        pub enum Bug {
            $($(#[$doc])+ $bug,)+
        }

        #[cfg(feature = "planted")]
        impl Bug {
            /// Every bug there is.
            pub const ALL: &[Bug] = &[$(Bug::$bug),+];
        }
    };
}

bugs! {
    /// An answer leaves before what it says is committed.
    AcknowledgeBeforeCommit,
    /// The window and the step are committed before the blocks.
    SequenceBeforeFlip,
    /// A restarted client is taken for its older self.
    NoIncarnation,
    /// What was streamed is not waited for before it is named.
    MissingFence,
    /// The data is not flushed before what names it.
    SkipFsync,
    /// A checkpoint is published before it is read again.
    PublishBeforeVerify,
    /// A recovery that is killed is not begun again.
    RecoveryNotIdempotent,
    /// An outcome is forgotten while its push may still come again.
    EvictLiveOutcome,
    /// Rows are changed before what they held is kept.
    UndoAfterWrite,
    /// Blocks are reused before the commit that frees them.
    ReuseBeforeCommit,
    /// The tokens of a lost replica are never given to anybody else.
    KeepLostTokens,
    /// A push is admitted when one shard holds it.
    AdmitBeforeWhole,
    /// What was admitted is not remembered by the next process.
    ForgetAdmissions,
    /// A shard applies a step when it has enough pushes, whatever the step owner says.
    CommitAlone,
    /// The sum of a step's gradients is divided by how many a step takes, however many it took.
    MeanOfAll,
    /// A push is taken for what its replica was last granted, whatever its token.
    KeyByReplica,
    /// A self of a client that has been fenced is welcome again.
    StaleEpoch,
    /// A chief goes on when another has come.
    StaleChief,
    /// A step is begun while a shard has the last one still to apply.
    BeginEarly,
    /// A block that somebody reads in lent memory is written.
    PinIgnored,
    /// Whoever reads for too long, or over a connection that is gone, is not told that what it reads was
    /// taken back.
    RevokedUnseen,
    /// What a commit has changed is shown to readers in lent memory only with the next one.
    SequenceLate,
    /// A token of a lost client is taken back in asynchronous mode before the other shards were asked.
    TakeBackUnasked,
    /// A client that has connected anew sends a push to every shard at once, without the step owner's
    /// word: no bug of a server, and planted in the simulator's clients.
    OwnerNotAsked,
    /// A client writes its next gradients into a room of a tray before the push there is settled: no bug of
    /// a server, and planted in the simulator's clients.
    SlotEarly,
}

/// Which bug is planted, if any.
#[cfg_attr(
    not(feature = "planted"),
    allow(unreachable_pub, reason = "public with the feature only")
)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PlantedBugs {
    #[cfg(feature = "planted")]
    bug: Option<Bug>,
}

impl PlantedBugs {
    /// With this bug.
    #[cfg(feature = "planted")]
    pub fn with(bug: Bug) -> PlantedBugs {
        PlantedBugs { bug: Some(bug) }
    }

    /// The bug, if there is one.
    #[cfg(feature = "planted")]
    pub fn bug(self) -> Option<Bug> {
        self.bug
    }

    #[cfg(feature = "planted")]
    pub(crate) fn has(self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    #[cfg(not(feature = "planted"))]
    pub(crate) fn has(self, _bug: Bug) -> bool {
        false
    }
}
