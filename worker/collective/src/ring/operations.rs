//! The collective operations of a ring.

use std::ops::Range;

use pushpull_common::protocol::message::{Collective, RingEnd};
use pushpull_common::protocol::refusal::Detail;

use super::Ring;
use crate::element::RingElement;
use crate::error::RingError;
use crate::fold;
use crate::gathered::Gathered;
use crate::planted::PlantedRingBugs;
use crate::reduction::Reduction;
use crate::running::Task;
use crate::schedule::{Chunks, ScheduleKind};

/// The largest tensor that is reduced by a gather: one pass less for each other rank, and more
/// bytes.
const GATHERED_BYTES_MAX: usize = 16 << 10;

/// The most bytes that such a reduction gathers.
const GATHER_BYTES_MAX: usize = 1 << 20;

impl Ring {
    /// Reduces a tensor: afterwards every rank has the reduction of what all ranks had in it.
    ///
    /// Sends and receives 2(n-1)/n times the bytes of the tensor, in 2(n-1) passes.
    ///
    /// # Errors
    /// Those of the ring, see [`RingError`]; [`RingError::Argument`] for a mean of integers. The
    /// content of `values` is unspecified after an error.
    #[doc(alias = "hvd.allreduce")]
    pub async fn all_reduce<T: RingElement>(
        &mut self,
        values: &mut [T],
        reduction: Reduction,
    ) -> Result<(), RingError> {
        self.all_reduce_as("", values, reduction).await
    }

    /// Reduces a tensor with a name, which every rank must give: otherwise as
    /// [`Ring::all_reduce`].
    ///
    /// # Errors
    /// As [`Ring::all_reduce`].
    pub async fn all_reduce_as<T: RingElement>(
        &mut self,
        name: &str,
        values: &mut [T],
        reduction: Reduction,
    ) -> Result<(), RingError> {
        let collective = match reduction {
            Reduction::Sum => Collective::ReduceSum {},
            Reduction::Mean => Collective::ReduceMean {},
            Reduction::Min => Collective::ReduceMin {},
            Reduction::Max => Collective::ReduceMax {},
        };
        self.check_reduction::<T>("all-reduce", reduction)?;
        self.check_finite("all-reduce", name, values, false).await?;
        let task = Task {
            collective,
            schedule: ScheduleKind::AllReduce,
            kind: T::KIND,
            reduction,
            count: values.len(),
            elements: values.len(),
            encoded: None,
            name,
        };
        let bytes = size_of_val(values);
        let gathered = bytes.saturating_mul(self.size() as usize);
        // Two ranks exchange as many bytes either way.
        match bytes <= GATHERED_BYTES_MAX && gathered <= GATHER_BYTES_MAX && self.size() > 1 {
            true => self.reduce_gathered(task, bytemuck::cast_slice_mut(values)).await,
            false => self.perform(&task, bytemuck::cast_slice_mut(values)).await,
        }
    }

    /// Gathers the contributions of all ranks and reduces them on each, in the order of
    /// [`ScheduleKind::AllReduce`].
    async fn reduce_gathered(
        &mut self,
        task: Task<'_>,
        values: &mut [u8],
    ) -> Result<(), RingError> {
        let ranks = self.size();
        let rank = self.rank() as usize;
        let length = values.len();
        let mut scratch = std::mem::take(&mut self.scratch);
        let stride = length;
        scratch.resize(scratch.len().max((stride * ranks as usize).div_ceil(size_of::<u64>())), 0);
        let blocks: &mut [u8] =
            &mut bytemuck::cast_slice_mut(&mut scratch)[..stride * ranks as usize];
        blocks[rank * stride..][..length].copy_from_slice(values);
        let elements = task.count * ranks as usize;
        let gather = Task { schedule: ScheduleKind::Gather, elements, ..task };
        let mut performed = self.perform(&gather, blocks).await;
        let mut overflow = None;
        if performed.is_ok() {
            let gathered = Gathered {
                blocks,
                kind: task.kind,
                ranks,
                rank: self.rank(),
                planted: PlantedRingBugs::default(),
            };
            overflow = gathered.reduce(task.reduction, values);
        }
        self.scratch = scratch;
        if let Some(element) = overflow {
            // Every rank has the same values, and finds it.
            let detail = format!("the sum of element {element} exceeds {}", task.kind);
            let end = RingEnd::GivenUp { rank: self.rank(), detail: Detail::shortened(detail) };
            performed = Err(self.over(end).await);
        }
        performed
    }

    /// Reduces a tensor, of which each rank keeps one block: the range of elements that is
    /// returned. The rest of `values` is unspecified afterwards.
    ///
    /// Rank `r` has block `r` of n blocks, whose lengths differ by at most one. Block `b` is
    /// combined in rank order beginning at `b + 1`. Sends (n-1)/n times the bytes of the tensor.
    ///
    /// # Errors
    /// As [`Ring::all_reduce`].
    #[doc(alias = "hvd.reducescatter")]
    pub async fn reduce_scatter<T: RingElement>(
        &mut self,
        values: &mut [T],
        reduction: Reduction,
    ) -> Result<Range<usize>, RingError> {
        let collective = match reduction {
            Reduction::Sum => Collective::ScatterSum {},
            Reduction::Mean => Collective::ScatterMean {},
            Reduction::Min => Collective::ScatterMin {},
            Reduction::Max => Collective::ScatterMax {},
        };
        self.check_reduction::<T>("reduce-scatter", reduction)?;
        self.check_finite("reduce-scatter", "", values, false).await?;
        let elements = values.len();
        let task = Task {
            collective,
            schedule: ScheduleKind::ReduceScatter,
            kind: T::KIND,
            reduction,
            count: elements,
            elements,
            encoded: None,
            name: "",
        };
        self.perform(&task, bytemuck::cast_slice_mut(values)).await?;
        Ok(Chunks::new(elements, size_of::<T>(), self.size()).elements(self.rank()))
    }

    /// Gathers the tensors of all ranks: afterwards `all` has them one after the other, in order of
    /// ranks. `all` has as many elements as `mine` times the number of ranks.
    ///
    /// Sends (n-1)/n times the bytes of `all`.
    ///
    /// # Errors
    /// Those of the ring, see [`RingError`]; [`RingError::Argument`] if `all` has another length.
    #[doc(alias = "hvd.allgather")]
    pub async fn all_gather<T: RingElement>(
        &mut self,
        mine: &[T],
        all: &mut [T],
    ) -> Result<(), RingError> {
        let expected = mine.len().saturating_mul(self.size() as usize);
        if all.len() != expected {
            return Err(RingError::Argument {
                doing: "all-gather".to_owned(),
                fault: format!(
                    "{} ranks with {} elements each need {expected}, and there are {}",
                    self.size(),
                    mine.len(),
                    all.len()
                ),
            });
        }
        let begin = mine.len() * self.rank() as usize;
        all[begin..begin + mine.len()].copy_from_slice(mine);
        let task = Task {
            collective: Collective::Gather {},
            schedule: ScheduleKind::Gather,
            kind: T::KIND,
            reduction: Reduction::Sum,
            count: mine.len(),
            elements: all.len(),
            encoded: None,
            name: "",
        };
        self.perform(&task, bytemuck::cast_slice_mut(all)).await
    }

    /// Sends the tensor of one rank to all: afterwards every rank has what `root` had in it.
    ///
    /// # Errors
    /// Those of the ring, see [`RingError`]; [`RingError::Argument`] if there is no such rank.
    #[doc(alias = "hvd.broadcast")]
    #[doc(alias = "hvd.broadcast_global_variables")]
    #[doc(alias = "hvd.BroadcastGlobalVariablesHook")]
    pub async fn broadcast<T: RingElement>(
        &mut self,
        values: &mut [T],
        root: u32,
    ) -> Result<(), RingError> {
        if root >= self.size() {
            return Err(RingError::Argument {
                doing: "broadcast".to_owned(),
                fault: format!("the root is rank {root} of {}", self.size()),
            });
        }
        let task = Task {
            collective: Collective::Broadcast { root },
            schedule: ScheduleKind::Broadcast { root },
            kind: T::KIND,
            reduction: Reduction::Sum,
            count: values.len(),
            elements: values.len(),
            encoded: None,
            name: "",
        };
        self.perform(&task, bytemuck::cast_slice_mut(values)).await
    }

    /// Waits until every rank has come to the barrier.
    ///
    /// # Errors
    /// Those of the ring, see [`RingError`].
    #[doc(alias = "hvd.barrier")]
    pub async fn barrier(&mut self) -> Result<(), RingError> {
        self.barrier_as("").await
    }

    /// Waits until every rank has come to the barrier of this name. Ranks with two names get
    /// [`RingError::Difference`], so it also checks that all agree on a fact. Names of more than 256
    /// bytes are shortened.
    ///
    /// # Errors
    /// Those of the ring, see [`RingError`].
    pub async fn barrier_as(&mut self, name: &str) -> Result<(), RingError> {
        let mut all = vec![0_u8; self.size() as usize * size_of::<i32>()];
        let task = Task {
            collective: Collective::Barrier {},
            schedule: ScheduleKind::Gather,
            kind: i32::KIND,
            reduction: Reduction::Sum,
            count: 1,
            elements: self.size() as usize,
            encoded: None,
            name,
        };
        self.perform(&task, &mut all).await
    }

    /// Returns the lowest rank that has the highest number, for example the newest step, and that
    /// number. After [`Ring::shrink`] and [`Ring::regroup`] the others take their state from it. A rank
    /// without a state has the number 0.
    ///
    /// # Errors
    /// Those of the ring, see [`RingError`]; [`RingError::Argument`] for a number above `i64::MAX`.
    pub async fn newest(&mut self, number: u64) -> Result<(u32, u64), RingError> {
        let own = i64::try_from(number).map_err(|_| RingError::Argument {
            doing: "find the newest rank".to_owned(),
            fault: format!("the number {number} is above {}", i64::MAX),
        })?;
        let mut numbers = vec![0; self.size() as usize];
        self.all_gather(&[own], &mut numbers).await?;
        let highest = numbers.iter().copied().max().unwrap_or(0);
        let rank = numbers.iter().position(|number| *number == highest).unwrap_or(0);
        // It was one of these.
        Ok((rank as u32, highest.max(0) as u64))
    }

    fn check_reduction<T: RingElement>(
        &self,
        doing: &str,
        reduction: Reduction,
    ) -> Result<(), RingError> {
        match reduction.allows(T::KIND) {
            true => Ok(()),
            false => Err(RingError::Argument {
                doing: doing.to_owned(),
                fault: format!("{} has no {reduction}", T::KIND),
            }),
        }
    }

    /// Refuses values that are not finite, if the ring or the operation is to, and tells the others.
    pub(super) async fn check_finite<T: RingElement>(
        &mut self,
        doing: &str,
        name: &str,
        values: &[T],
        always: bool,
    ) -> Result<(), RingError> {
        if !self.config.non_finite_is_error && !always {
            return Ok(());
        }
        let Some((element, value)) = fold::first_non_finite(T::KIND, bytemuck::cast_slice(values))
        else {
            return Ok(());
        };
        let doing = match name {
            "" => doing.to_owned(),
            name => format!("{doing} {name:?}"),
        };
        let error = RingError::NonFinite { doing, element, value };
        let rank = self.rank();
        let detail = Detail::shortened(error.to_string());
        self.over(RingEnd::GivenUp { rank, detail }).await;
        Err(error)
    }
}
