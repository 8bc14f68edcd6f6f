//! The memory of a server: where it is, its limits, and the failures that it survives.

use std::path::PathBuf;

use pushpull_common::permissions::Writers;

/// The memory in which a server keeps its variables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Storage {
    /// The state directory; none for anonymous memory.
    pub(crate) directory: Option<PathBuf>,
    /// The limit; `None` for the default.
    pub(crate) bytes_max: Option<u64>,
    pub(crate) writers: Writers,
    pub(crate) durability: Durability,
    pub(crate) integrity_full: bool,
    pub(crate) pin_bytes_max: Option<u64>,
}

impl Storage {
    /// The default memory limit: 16 GiB. In a control group with less memory, such as a container, the
    /// default is three quarters of that.
    pub const BYTES_MAX: u64 = 16 << 30;

    /// The least memory limit: 64 KiB. A server with less holds no variable beside its own state.
    pub const BYTES_MAX_MIN: u64 = 64 << 10;

    /// Configures anonymous memory, lost with the process.
    pub const fn memory() -> Self {
        Storage {
            directory: None,
            bytes_max: None,
            writers: Writers::Owner,
            durability: Durability::Process,
            integrity_full: false,
            pin_bytes_max: None,
        }
    }

    /// Configures memory-mapped files in a directory. The directory is created if needed, must
    /// belong to this user alone, and is locked.
    ///
    /// The mapped files are the server's state: a server started on them continues where the
    /// previous one was stopped or killed. Put the directory on a memory file system, for example
    /// `/dev/shm`; on a disk, writers stall while the kernel writes a page back. State from before
    /// a reboot is rejected, except with [`Durability::Power`]. The files remain when the server
    /// stops. To start from nothing, remove the directory.
    pub fn directory(state: impl Into<PathBuf>) -> Self {
        Storage { directory: Some(state.into()), ..Storage::memory() }
    }

    /// Sets the limit for all shards of the task together, in bytes. Variables are accepted if
    /// twice their bytes and those of their optimizer slots fit, and the bytes of one push; in
    /// synchronous mode, of one push more than a step has gradients. With checkpoints or
    /// [`Durability::Power`], the bytes of [`Storage::pin_bytes_max`] are included. Other memory is
    /// taken when it is needed and returned after five seconds without use: by further push slots
    /// ([`PsConfig::inbox_pushes`](crate::PsConfig::inbox_pushes)), and by updates while pulls pin
    /// what they read (not returned, without a state directory, once a client of the same host has
    /// mapped the values, until they are declared again). Bytes that embedding tables may still grow
    /// by are kept for them. Default [`Storage::BYTES_MAX`], or three quarters of the memory limit of
    /// this process's control group if that is less. At least [`Storage::BYTES_MAX_MIN`].
    pub fn bytes_max(self, bytes: u64) -> Self {
        Storage { bytes_max: Some(bytes), ..self }
    }

    /// Accepts a state directory that its group may write, if this process belongs to the group. A
    /// volume of Kubernetes with `fsGroup` is such a directory. Every member of the group can change
    /// the state. Default false.
    pub fn group_writable(self, accepted: bool) -> Self {
        Storage { writers: if accepted { Writers::Group } else { Writers::Owner }, ..self }
    }

    /// Sets which failures an acknowledged push survives. Default [`Durability::Process`].
    pub fn durability(self, durability: Durability) -> Self {
        Storage { durability, ..self }
    }

    /// Sets whether the state has a checksum of every block of values and slots, verified when the
    /// state is opened. Costs a pass over the whole state then, and a pass over every block that a
    /// push changes. Tables and everything else that names blocks always have checksums. Default
    /// false.
    pub fn integrity_full(self, full: bool) -> Self {
        Storage { integrity_full: full, ..self }
    }

    /// Limits the bytes of values that each shard keeps pinned for pulls being sent and checkpoints
    /// being written while pushes continue. The same limit holds for each optimizer slot. At the
    /// limit, and where [`Storage::bytes_max`] leaves no memory for it, pushes wait for the slowest
    /// pull, and a checkpoint is abandoned. Default: the size of the shard's values, with which a
    /// checkpoint is never abandoned.
    pub fn pin_bytes_max(self, bytes: u64) -> Self {
        Storage { pin_bytes_max: Some(bytes), ..self }
    }
}

/// The failures that an acknowledged push survives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Durability {
    /// The end of this process by any cause, with [`Storage::directory`]: kill -9, a panic, the
    /// out-of-memory killer, an upgrade. If the machine's memory is lost, the newest checkpoint
    /// remains, and [`crate::Checkpoints::every`] bounds the loss. Costs a few percent of a push.
    #[default]
    Process,
    /// A power failure as well, if the disk honors flushes. Requires [`Storage::directory`] on a
    /// disk. Responses wait for the disk and share its flushes, a few milliseconds each, and every
    /// changed block is written. For small models. Not available in [`crate::Mode::Synchronous`].
    Power,
}
