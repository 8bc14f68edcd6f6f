//! [`GradientStream`]: a step whose gradients are reduced as they become ready.

use std::sync::Arc;

use pushpull_collective::Ring;
use pushpull_common::ids::VariableId;
use pushpull_common::tensor::Element;

use super::bucket_plan::BucketPlan;
use super::bucket_progress::BucketProgress;
use super::bucket_reducer::{BucketReducer, ReducedBuckets, StreamedWork};
use super::gradient_codecs::GradientCodecs;
use super::ring_worker::RingWish;
use crate::error::{Error, ViewError};
use crate::gradients::gradient_buffer::AlignedBuffer;
use crate::gradients::sharding_plan::ShardingPlan;
use crate::initial_values::check_whole;

/// A step whose gradients are reduced as they become ready. Its thread has the ring meanwhile.
#[derive(Debug)]
pub(super) struct GradientStream {
    plan: Arc<ShardingPlan>,
    buckets: Arc<BucketPlan>,
    progress: BucketProgress,
    /// The memory of the buckets that are not handed over.
    memory: Vec<AlignedBuffer>,
    reducer: BucketReducer,
}

impl GradientStream {
    /// Begins a step, and takes the ring and the codecs for it. `memory` is that of an earlier step.
    ///
    /// # Errors
    /// [`Error::Thread`]. Both stay then.
    pub(super) fn begin(
        ring: &mut Ring,
        codecs: &mut GradientCodecs,
        plan: Arc<ShardingPlan>,
        buckets: Arc<BucketPlan>,
        agrees_on: Option<u64>,
        mut memory: Vec<AlignedBuffer>,
    ) -> Result<GradientStream, Error> {
        memory.resize_with(buckets.buckets().len(), || AlignedBuffer::of_bytes(0));
        for (buffer, bucket) in memory.iter_mut().zip(buckets.buckets()) {
            buffer.resize(bucket.range.len());
        }
        let work = || StreamedWork {
            ring: ring.take(),
            codecs: std::mem::take(codecs),
            plan: plan.clone(),
            buckets: buckets.clone(),
            agrees_on,
        };
        let reducer = BucketReducer::start(memory.len(), work)?;
        let progress = BucketProgress::new(&buckets, plan.catalogue().variables().len());
        Ok(GradientStream { plan, buckets, progress, memory, reducer })
    }

    /// Takes the gradient of a variable, and has the buckets reduced that are complete with it.
    ///
    /// # Errors
    /// [`Error::View`]. Nothing has changed then.
    pub(super) fn variable<T: Element>(&mut self, name: &str, gradient: &[T]) -> Result<(), Error> {
        let id = check_whole(&self.plan, name, gradient)?;
        let name = || name.to_owned();
        let place = self.buckets.place(id).ok_or_else(|| ViewError::Plain { name: name() })?;
        if self.progress.has(id) {
            return Err(ViewError::Twice { name: name() }.into());
        }
        let within = self.buckets.buckets()[place].within(&self.plan.range(id));
        let bytes = bytemuck::cast_slice(gradient);
        self.memory[place].bytes_mut()[within].copy_from_slice(bytes);
        self.progress.add(id, place);
        while let Some(complete) = self.progress.next_complete() {
            let none = AlignedBuffer::of_bytes(0);
            self.reducer.reduce(std::mem::replace(&mut self.memory[complete], none));
        }
        Ok(())
    }

    /// Waits for the means of all gradients.
    ///
    /// # Errors
    /// [`Error::EmptyPush`] if no gradient has come: nothing was sent. [`ViewError::Missing`] if
    /// some have not: the ring is given up, because the other ranks wait for them.
    ///
    /// Dropping the future changes nothing.
    pub(super) async fn reduced(&mut self) -> Result<ReducedBuckets, Error> {
        if self.progress.is_empty() {
            return Err(Error::EmptyPush);
        }
        let missing = self.progress.first_missing(&self.buckets);
        if let Some(id) = missing {
            let name = self.plan.catalogue().variable(id).name();
            self.reducer.give_up(format!("its streamed step has no gradient of {name:?}"));
        }
        let mut ended = self.reducer.ended().await?;
        let is_wanted = ended.agreement.is_none_or(|agreed| agreed.wish == RingWish::Step);
        if let Some(id) = missing.filter(|_| is_wanted) {
            let name = self.plan.catalogue().variable(id).name().to_owned();
            ended.result = Err(ViewError::Missing { name }.into());
        }
        Ok(ended)
    }

    /// Ends the step without its means, and returns its ring. The ring is given up if the other
    /// ranks have a part of the gradients.
    ///
    /// # Errors
    /// [`Error::Thread`] if the ring is gone.
    pub(super) fn stop(mut self) -> Result<ReducedBuckets, Error> {
        self.reducer.stop()
    }

    /// Returns the memory of the buckets that the thread has not had. `reduced` is that of the
    /// others.
    pub(super) fn memory_with(self, reduced: Vec<AlignedBuffer>) -> Vec<AlignedBuffer> {
        let mut memory = self.memory;
        memory.splice(..reduced.len(), reduced);
        memory
    }
}

/// The means of a step's gradients, in the memory of its buckets.
#[derive(Debug, Default)]
pub(super) struct BucketMeans(pub(super) Vec<AlignedBuffer>);

impl BucketMeans {
    /// Returns the elements of a variable; none if it has no gradient.
    pub(super) fn bytes_of(
        &self,
        plan: &ShardingPlan,
        buckets: &BucketPlan,
        id: VariableId,
    ) -> &[u8] {
        let Some(place) = buckets.place(id) else { return &[] };
        let within = buckets.buckets()[place].within(&plan.range(id));
        &self.0[place].bytes()[within]
    }
}
