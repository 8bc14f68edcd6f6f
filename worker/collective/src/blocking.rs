//! The blocking twin of a ring.

use std::fmt;
use std::ops::Range;

use pushpull_common::codec::Real;

use crate::block_on::block_on;
use crate::config::RingConfig;
use crate::element::RingElement;
use crate::error::RingError;
use crate::metrics::RingMetrics;
use crate::reduction::Reduction;
use crate::ring::{EncodedTensor, Tensor};
use pushpull_common::launch::Launch;

/// A [`crate::Ring`] for threads without an async runtime. Its operations move bytes on the calling
/// thread, which polls for a short time before it sleeps.
#[derive(Debug)]
pub struct Ring(crate::Ring);

impl Ring {
    /// Joins the ring of a job; see [`crate::Ring::join`].
    ///
    /// # Errors
    /// As there.
    #[doc(alias = "hvd.init")]
    pub fn join(config: RingConfig) -> Result<Ring, RingError> {
        block_on(crate::Ring::join_blocking(config)).map(Ring)
    }

    /// The position of this process in the ring; see [`crate::Ring::rank`].
    #[doc(alias = "hvd.rank")]
    pub fn rank(&self) -> u32 {
        self.0.rank()
    }

    /// The number of ranks; see [`crate::Ring::size`].
    #[doc(alias = "hvd.size")]
    pub fn size(&self) -> u32 {
        self.0.size()
    }

    /// The position among the processes of this host; see [`crate::Ring::local_rank`].
    #[doc(alias = "hvd.local_rank")]
    pub fn local_rank(&self) -> u32 {
        self.0.local_rank()
    }

    /// The stable number of this member; see [`crate::Ring::index`].
    pub fn index(&self) -> u32 {
        self.0.index()
    }

    /// The number of the ring; see [`crate::Ring::epoch`].
    pub fn epoch(&self) -> u64 {
        self.0.epoch()
    }

    /// The hosts of all ranks; see [`crate::Ring::hosts`].
    pub fn hosts(&self) -> impl Iterator<Item = &str> {
        self.0.hosts()
    }

    /// The number of members that wait for the next ring; see [`crate::Ring::joiners`].
    pub fn joiners(&self) -> u32 {
        self.0.joiners()
    }

    /// The place of this process in its job.
    pub fn launch(&self) -> &Launch {
        self.0.launch()
    }

    /// Returns the counts and times of this rank; see [`crate::Ring::metrics`].
    pub fn metrics(&self) -> RingMetrics {
        self.0.metrics()
    }

    /// Reduces a tensor; see [`crate::Ring::all_reduce`].
    ///
    /// # Errors
    /// As there.
    #[doc(alias = "hvd.allreduce")]
    pub fn all_reduce<T: RingElement>(
        &mut self,
        values: &mut [T],
        reduction: Reduction,
    ) -> Result<(), RingError> {
        block_on(self.0.all_reduce(values, reduction))
    }

    /// Reduces a tensor with a name; see [`crate::Ring::all_reduce_as`].
    ///
    /// # Errors
    /// As there.
    pub fn all_reduce_as<T: RingElement>(
        &mut self,
        name: &str,
        values: &mut [T],
        reduction: Reduction,
    ) -> Result<(), RingError> {
        block_on(self.0.all_reduce_as(name, values, reduction))
    }

    /// Reduces several tensors; see [`crate::Ring::all_reduce_fused`].
    ///
    /// # Errors
    /// As there.
    #[doc(alias = "hvd.grouped_allreduce")]
    #[doc(alias = "hvd.DistributedOptimizer")]
    pub fn all_reduce_fused<T: RingElement>(
        &mut self,
        tensors: &mut [Tensor<'_, T>],
        reduction: Reduction,
    ) -> Result<(), RingError> {
        block_on(self.0.all_reduce_fused(tensors, reduction))
    }

    /// Reduces a tensor that travels encoded; see [`crate::Ring::all_reduce_encoded`].
    ///
    /// # Errors
    /// As there.
    #[doc(alias = "hvd.Compression")]
    pub fn all_reduce_encoded<T: RingElement + Real>(
        &mut self,
        tensor: EncodedTensor<'_, T>,
        reduction: Reduction,
    ) -> Result<(), RingError> {
        block_on(self.0.all_reduce_encoded(tensor, reduction))
    }

    /// Reduces a tensor, of which each rank keeps a block; see [`crate::Ring::reduce_scatter`].
    ///
    /// # Errors
    /// As there.
    #[doc(alias = "hvd.reducescatter")]
    pub fn reduce_scatter<T: RingElement>(
        &mut self,
        values: &mut [T],
        reduction: Reduction,
    ) -> Result<Range<usize>, RingError> {
        block_on(self.0.reduce_scatter(values, reduction))
    }

    /// Gathers the tensors of all ranks; see [`crate::Ring::all_gather`].
    ///
    /// # Errors
    /// As there.
    #[doc(alias = "hvd.allgather")]
    pub fn all_gather<T: RingElement>(
        &mut self,
        mine: &[T],
        all: &mut [T],
    ) -> Result<(), RingError> {
        block_on(self.0.all_gather(mine, all))
    }

    /// Sends the tensor of one rank to all; see [`crate::Ring::broadcast`].
    ///
    /// # Errors
    /// As there.
    #[doc(alias = "hvd.broadcast")]
    #[doc(alias = "hvd.broadcast_global_variables")]
    #[doc(alias = "hvd.BroadcastGlobalVariablesHook")]
    pub fn broadcast<T: RingElement>(
        &mut self,
        values: &mut [T],
        root: u32,
    ) -> Result<(), RingError> {
        block_on(self.0.broadcast(values, root))
    }

    /// Waits until every rank has come; see [`crate::Ring::barrier`].
    ///
    /// # Errors
    /// As there.
    #[doc(alias = "hvd.barrier")]
    pub fn barrier(&mut self) -> Result<(), RingError> {
        block_on(self.0.barrier())
    }

    /// Waits until every rank has come to the barrier of this name; see
    /// [`crate::Ring::barrier_as`].
    ///
    /// # Errors
    /// As there.
    pub fn barrier_as(&mut self, name: &str) -> Result<(), RingError> {
        block_on(self.0.barrier_as(name))
    }

    /// Returns the lowest rank that has the highest number, and that; see [`crate::Ring::newest`].
    ///
    /// # Errors
    /// As there.
    pub fn newest(&mut self, number: u64) -> Result<(u32, u64), RingError> {
        block_on(self.0.newest(number))
    }

    /// Ends the ring for all ranks; see [`crate::Ring::give_up`].
    pub fn give_up(&mut self, reason: &str) -> RingError {
        block_on(self.0.give_up(reason))
    }

    /// Returns the ring for code that takes either kind. Its operations block the thread that polls
    /// them.
    pub fn into_inner(self) -> crate::Ring {
        self.0
    }

    /// Forms the next ring with the ranks that are left; see [`crate::Ring::shrink`].
    ///
    /// # Errors
    /// As there.
    pub fn shrink(&mut self) -> Result<(), RingError> {
        block_on(self.0.shrink())
    }

    /// Lets waiting members in; see [`crate::Ring::regroup`].
    ///
    /// # Errors
    /// As there.
    pub fn regroup(&mut self) -> Result<bool, RingError> {
        block_on(self.0.regroup())
    }

    /// Leaves the ring; see [`crate::Ring::leave`].
    #[doc(alias = "hvd.shutdown")]
    pub fn leave(self) {
        block_on(self.0.leave());
    }
}

impl fmt::Display for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
