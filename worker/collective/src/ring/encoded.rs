//! Reductions of tensors that travel encoded.

use pushpull_common::codec::{Codec, Real, Residual};
use pushpull_common::protocol::message::{Collective, RingCodec, RingEnd};
use pushpull_common::protocol::refusal::Detail;

use crate::element::RingElement;
use crate::encoded::{OwnElements, Stretches};
use crate::error::RingError;
use crate::fold;
use crate::reduction::Reduction;
use crate::ring::Ring;
use crate::running::{Operand, Task};
use crate::schedule::{Chunks, Schedule, ScheduleKind};

/// A tensor of an encoded reduction.
#[derive(Debug)]
pub struct EncodedTensor<'a, T> {
    /// Its name, which every rank must give.
    pub name: &'a str,
    /// The codec of the sums that travel. [`Codec::Threshold`] is refused: the length of what it
    /// sends depends on the elements.
    pub codec: Codec,
    /// Its elements.
    pub values: &'a mut [T],
    /// The sums that earlier encodings of this rank have left out, one element for each of `values`.
    pub residual: &'a mut Residual<T>,
}

impl Ring {
    /// Reduces a tensor in fewer bytes: ranks send sums encoded. Each rank adds its residual to
    /// what it contributes, and keeps there what its encodings leave out. So nothing is lost: over
    /// all ranks and any number of operations, the sums that were returned and the residuals add up
    /// to what was contributed, up to the rounding of `T`.
    ///
    /// The result is bit-equal on all ranks, and in every run with as many ranks. It has the error
    /// of n encodings, which later operations repair. A ring of one encodes as well.
    ///
    /// Sends and receives 2(n-1)/n times the bytes of the encoded tensor, in 2(n-1) passes. Every
    /// rank encodes the tensor once and decodes it twice. Takes memory for the encoded tensor.
    ///
    /// # Errors
    /// - Those of the ring, see [`RingError`]. The content of `values` is unspecified then, and the
    ///   residual has what this rank's encodings have left out until then: what they sent is lost.
    /// - [`RingError::Difference`] if another rank has another codec.
    /// - [`RingError::Argument`] for a minimum or a maximum, an invalid codec, a threshold, and a
    ///   residual of another length.
    /// - [`RingError::NonFinite`] for NaN and infinities, which only f16 and bf16 can express. The
    ///   ring is over then, and the others get [`RingError::GivenUp`].
    #[doc(alias = "hvd.Compression")]
    pub async fn all_reduce_encoded<T: RingElement + Real>(
        &mut self,
        tensor: EncodedTensor<'_, T>,
        reduction: Reduction,
    ) -> Result<(), RingError> {
        let EncodedTensor { name, codec, values, residual } = tensor;
        let collective = match reduction {
            Reduction::Sum => Collective::ReduceSum {},
            Reduction::Mean => Collective::ReduceMean {},
            Reduction::Min | Reduction::Max => {
                return Err(refused(format!("{codec} has no {reduction}: it sends sums")));
            }
        };
        codec.validate().map_err(|error| refused(error.to_string()))?;
        if RingCodec::of(codec).is_none() {
            return Err(refused(format!("the length of {codec} depends on the elements")));
        }
        if residual.left().len() != values.len() {
            let (has, needs) = (residual.left().len(), values.len());
            return Err(refused(format!("{needs} elements have a residual of {has}")));
        }
        let takes_all = codec.encoding().takes_non_finite();
        self.check_finite("all-reduce", name, values, !takes_all).await?;
        let stretches = Stretches::new(codec, T::DTYPE, values.len(), self.size());
        let task = Task {
            collective,
            schedule: ScheduleKind::AllReduce,
            kind: T::KIND,
            reduction,
            count: values.len(),
            elements: stretches.count(),
            encoded: Some(stretches),
            name,
        };
        let own = OwnElements::new(stretches, values, residual);
        self.reduce_encoded(&task, stretches, own).await?;
        fold::finish(T::KIND, reduction, self.size(), bytemuck::cast_slice_mut(values));
        Ok(())
    }

    async fn reduce_encoded<T: Real + Send>(
        &mut self,
        task: &Task<'_>,
        stretches: Stretches,
        mut own: OwnElements<'_, T>,
    ) -> Result<(), RingError> {
        let length = stretches.count() * stretches.width();
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.resize(scratch.len().max(length.div_ceil(size_of::<u64>())), 0);
        let sums: &mut [u8] = &mut bytemuck::cast_slice_mut(&mut scratch)[..length];
        let chunks = Chunks::new(stretches.count(), stretches.width(), self.size());
        let schedule = Schedule::new(task.schedule, self.rank(), self.size(), chunks);
        let mut reduced = match own.begin(schedule.begins(), &mut sums[schedule.begins()]) {
            Ok(()) => {
                let mut operand = Operand { bytes: sums, contribution: Some(&mut own) };
                self.perform_on(task, &mut operand).await
            }
            Err(fault) => Err(refused(fault)),
        };
        if reduced.is_ok()
            && let Err(fault) = own.finish(sums)
        {
            // Only a rank that does not follow the protocol sends such bytes.
            let detail = Detail::shortened(format!("the sum of {:?}: {fault}", task.name));
            let end = RingEnd::GivenUp { rank: self.rank(), detail };
            reduced = Err(self.over(end).await);
        }
        self.scratch = scratch;
        reduced
    }
}

fn refused(fault: String) -> RingError {
    RingError::Argument { doing: "all-reduce encoded".to_owned(), fault }
}
