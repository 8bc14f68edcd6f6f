//! A replica's local copy of the variables, and the gradients that it pushes.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use pushpull_common::catalogue::Catalogue;
use pushpull_common::ids::{GlobalStep, VariableId};
use pushpull_common::tensor::Element;
use smallvec::SmallVec;

use super::gradient_buffer::{AlignedBuffer, BufferRun, GradientBuffer};
use super::row_ids;
use super::rows::RowGradients;
use super::sharding_plan::ShardingPlan;
use super::staged_parts::StagedParts;
use crate::error::ViewError;
use crate::initial_values::check_whole;

/// A local copy of all dense variables.
///
/// [`crate::Worker::join`] and [`crate::Reader::params`] create one. [`crate::Worker::pull`]
/// replaces the servers' values in it at once; if the pull fails or is dropped, it is unchanged
/// (but see [`crate::WorkerConfig::in_place_pulls`]).
/// The caller may change the values. [`crate::Worker::publish`] and [`crate::Worker::average`] send
/// those of variables that each replica changes by itself; no others are ever sent.
#[derive(Clone, Debug)]
pub struct Params {
    pub(crate) plan: Arc<ShardingPlan>,
    pub(crate) buffer: AlignedBuffer,
    pub(crate) step: GlobalStep,
}

impl Params {
    pub(crate) fn new(plan: Arc<ShardingPlan>) -> Params {
        Params { buffer: AlignedBuffer::of_bytes(plan.bytes()), plan, step: GlobalStep(0) }
    }

    /// The variables with their partitions, offsets and digest.
    pub fn catalogue(&self) -> &Catalogue {
        self.plan.catalogue()
    }

    /// The global step at which the values were read.
    pub fn step(&self) -> u64 {
        self.step.0
    }

    /// Returns the elements of a variable, in row-major order. Costs a look-up by name, no copy.
    ///
    /// # Errors
    /// [`ViewError::Unknown`], [`ViewError::Type`] or [`ViewError::Sparse`].
    pub fn view<T: Element>(&self, name: &str) -> Result<&[T], ViewError> {
        let range = self.plan.locate::<T>(name)?.1;
        Ok(bytemuck::cast_slice(&self.buffer.bytes()[range]))
    }

    /// Returns the elements of several variables of one type. Errors as for [`Params::view`].
    pub fn views<T: Element, const N: usize>(
        &self,
        names: [&str; N],
    ) -> Result<[&[T]; N], ViewError> {
        let mut views: [&[T]; N] = [&[]; N];
        for (view, name) in views.iter_mut().zip(names) {
            *view = self.view(name)?;
        }
        Ok(views)
    }

    /// Returns the elements of a variable, to be changed. Errors as for [`Params::view`].
    pub fn view_mut<T: Element>(&mut self, name: &str) -> Result<&mut [T], ViewError> {
        let range = self.plan.locate::<T>(name)?.1;
        Ok(bytemuck::cast_slice_mut(&mut self.buffer.bytes_mut()[range]))
    }
}

/// Gradients for one push, from [`crate::Worker::gradients`].
///
/// A push contains the variables that were viewed and the rows that were set; all others are left
/// out. The memory is reused, so the first view of a variable zeroes its gradient, and a loop may
/// add to it. A loop that writes all elements may do without: see [`Gradients::view_mut_unfilled`].
///
/// Dropping it pushes nothing.
#[derive(Debug)]
pub struct Gradients {
    pub(crate) plan: Arc<ShardingPlan>,
    pub(crate) memory: GradientMemory,
    /// The factors by which the servers multiply gradients of half types, in `f32`; above 0 and
    /// finite. 1 where there is none.
    pub(crate) factors: BTreeMap<VariableId, f64>,
}

impl Gradients {
    pub(crate) fn new(plan: Arc<ShardingPlan>, memory: GradientMemory) -> Gradients {
        let mut gradients = Gradients { plan, memory, factors: BTreeMap::new() };
        gradients.reset();
        gradients
    }

    /// Removes everything from the push.
    pub(crate) fn reset(&mut self) {
        self.memory.present.fill(false);
        self.memory.staged_mut().empty();
        self.factors.clear();
    }

    /// Returns the elements of a variable's gradient; arbitrary if it has none.
    pub(crate) fn bytes_of(&self, id: VariableId) -> &[u8] {
        self.memory.buffer.slice(self.plan.range(id))
    }

    pub(crate) fn bytes_of_mut(&mut self, id: VariableId) -> &mut [u8] {
        self.memory.buffer_mut().slice_mut(self.plan.range(id))
    }

    /// Returns the gradient of a dense variable, in row-major order, and adds it to the push.
    ///
    /// All elements are zero until the caller writes them. Further views show what was written,
    /// unless the variable was omitted in between.
    ///
    /// Cost: a look-up by name; the first view of a push writes zeros, at the bandwidth of the
    /// memory. [`Gradients::view_mut_unfilled`] does not.
    ///
    /// # Errors
    /// [`ViewError::Unknown`], [`ViewError::Type`] or [`ViewError::Sparse`]; [`ViewError::Plain`]
    /// for a plain variable.
    pub fn view_mut<T: Element>(&mut self, name: &str) -> Result<&mut [T], ViewError> {
        let [view] = self.views_mut([name])?;
        Ok(view)
    }

    /// Returns the gradients of several variables of one type, and adds them to the push. They are
    /// zero at first, as those of [`Gradients::view_mut`].
    ///
    /// # Errors
    /// Those of [`Gradients::view_mut`]; [`ViewError::Twice`] if a name is repeated. The push is
    /// unchanged then.
    pub fn views_mut<T: Element, const N: usize>(
        &mut self,
        names: [&str; N],
    ) -> Result<[&mut [T]; N], ViewError> {
        let mut views = std::array::from_fn(|_| &mut [][..]);
        self.view_all::<T>(&names, FirstContent::Zeros, &mut views)?;
        Ok(views.map(cast_elements))
    }

    /// Returns the gradient of a dense variable without zeroing it, and adds it to the push. The
    /// caller must write all elements: the memory has the numbers of an earlier push, possibly of
    /// another worker of the same host, and elements that are not written push those again.
    ///
    /// Saves the pass over the memory that the first [`Gradients::view_mut`] makes.
    ///
    /// # Errors
    /// Those of [`Gradients::view_mut`].
    pub fn view_mut_unfilled<T: Element>(&mut self, name: &str) -> Result<&mut [T], ViewError> {
        let [view] = self.views_mut_unfilled([name])?;
        Ok(view)
    }

    /// Returns the gradients of several variables of one type without zeroing them, and adds them
    /// to the push. The caller must write all elements, as with [`Gradients::view_mut_unfilled`].
    ///
    /// # Errors
    /// Those of [`Gradients::views_mut`].
    pub fn views_mut_unfilled<T: Element, const N: usize>(
        &mut self,
        names: [&str; N],
    ) -> Result<[&mut [T]; N], ViewError> {
        let mut views = std::array::from_fn(|_| &mut [][..]);
        self.view_all::<T>(&names, FirstContent::Arbitrary, &mut views)?;
        Ok(views.map(cast_elements))
    }

    /// Adds variables of type `T` to the push, and writes their gradients to `views`.
    pub(crate) fn view_all<'a, T: Element>(
        &'a mut self,
        names: &[&str],
        first: FirstContent,
        views: &mut [&'a mut [u8]],
    ) -> Result<(), ViewError> {
        let mut places = SmallVec::<[(VariableId, Range<usize>); 16]>::new();
        for &name in names {
            let (id, range) = self.plan.locate::<T>(name)?;
            if !self.plan.catalogue().variable(id).is_trainable() {
                return Err(ViewError::Plain { name: name.to_owned() });
            }
            if places.iter().any(|(other, _)| *other == id) {
                return Err(ViewError::Twice { name: name.to_owned() });
            }
            places.push((id, range));
        }
        for (id, range) in &places {
            self.apply_factor(*id);
            let was_present = std::mem::replace(&mut self.memory.present[id.0 as usize], true);
            if !was_present && first == FirstContent::Zeros {
                self.memory.buffer_mut().slice_mut(range.clone()).fill(0);
            }
        }
        let ranges: SmallVec<[_; 16]> = places.into_iter().map(|(_, range)| range).collect();
        self.memory.buffer_mut().slices_mut(&ranges, views);
        Ok(())
    }

    /// Sets the gradient of a sparse variable or a table: one row for each id, back to back in the
    /// order of `ids`.
    ///
    /// Ids may be in any order. Rows of one id are summed, in their order; rows of `f16` and `bf16`
    /// are summed in `f32` and rounded once. Replaces the rows that were set before. An empty list
    /// of rows is a gradient too, of zeros.
    ///
    /// Cost: a copy of the rows, and a sort of the ids unless they ascend.
    ///
    /// # Errors
    /// [`ViewError::Dense`], [`ViewError::Width`], [`ViewError::Row`], [`ViewError::RowsAtOnce`],
    /// and those of [`Gradients::view_mut`] except `Sparse`.
    pub fn set_rows<T: Element>(
        &mut self,
        name: &str,
        ids: &[u64],
        rows: &[T],
    ) -> Result<(), ViewError> {
        let id = row_ids::check::<T>(&self.plan, name, ids, rows.len())?;
        if !self.plan.catalogue().variable(id).is_trainable() {
            return Err(ViewError::Plain { name: name.to_owned() });
        }
        self.memory.rows_mut().set(&self.plan, id, ids, rows)?;
        self.factors.remove(&id);
        Ok(())
    }

    /// Removes a variable from the push.
    ///
    /// # Errors
    /// [`ViewError::Unknown`].
    pub fn omit(&mut self, name: &str) -> Result<(), ViewError> {
        let id = self.plan.find(name)?;
        self.memory.rows_mut().remove(id);
        self.factors.remove(&id);
        self.memory.present[id.0 as usize] = false;
        Ok(())
    }

    /// Sets the gradient of a dense variable as a streaming push does: whole, and once.
    ///
    /// # Errors
    /// [`ViewError`].
    #[doc(hidden)]
    pub fn collect_variable<T: Element>(
        &mut self,
        name: &str,
        gradient: &[T],
    ) -> Result<(), ViewError> {
        let id = check_whole(&self.plan, name, gradient)?;
        if self.present().any(|present| present == id) {
            return Err(ViewError::Twice { name: name.to_owned() });
        }
        self.view_mut_unfilled(name)?.copy_from_slice(gradient);
        Ok(())
    }

    /// Sets the rows of a sparse variable as a streaming push does: all, and once.
    ///
    /// # Errors
    /// [`ViewError`].
    #[doc(hidden)]
    pub fn collect_rows<T: Element>(
        &mut self,
        name: &str,
        ids: &[u64],
        rows: &[T],
    ) -> Result<(), ViewError> {
        let id = self.plan.find(name)?;
        if self.memory.rows().iter().any(|rows| rows.variable == id) {
            return Err(ViewError::Twice { name: name.to_owned() });
        }
        self.set_rows(name, ids, rows)
    }

    /// Returns the dense variables that have a gradient.
    pub(crate) fn present(&self) -> impl Iterator<Item = VariableId> + '_ {
        self.memory.present()
    }

    /// Whether no variable has a gradient.
    pub(crate) fn is_empty(&self) -> bool {
        let GradientMemory { staged, .. } = &self.memory;
        self.present().next().is_none() && staged.rows.is_empty() && staged.is_empty()
    }
}

/// The contents of a gradient at its first view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FirstContent {
    Zeros,
    /// The bytes that an earlier push has left in the memory.
    Arbitrary,
}

/// Returns bytes as the elements that they are.
pub(crate) fn cast_elements<T: Element>(bytes: &mut [u8]) -> &mut [T] {
    // An empty slice of the buffer may not be aligned.
    match bytes.is_empty() {
        true => &mut [],
        false => bytemuck::cast_slice_mut(bytes),
    }
}

/// The memory of gradients. A push shares it with the session until it has ended; then it can be
/// reused.
#[derive(Clone, Debug)]
pub(crate) struct GradientMemory {
    pub(crate) buffer: Arc<GradientBuffer>,
    /// Which dense variables have a gradient.
    pub(crate) present: Vec<bool>,
    /// The parts of this push alone: the gradients of sparse variables, and encoded gradients.
    pub(crate) staged: Arc<StagedParts>,
}

impl GradientMemory {
    /// Allocates memory for a plan. `runs` are the ranges that may be in push buffers.
    pub(crate) fn new(plan: &ShardingPlan, runs: Arc<[BufferRun]>) -> GradientMemory {
        GradientMemory::of_buffer(plan, GradientBuffer::new(plan.bytes(), runs))
    }

    /// Takes a buffer, which has at least the bytes of the plan.
    pub(crate) fn of_buffer(plan: &ShardingPlan, buffer: GradientBuffer) -> GradientMemory {
        let present = vec![false; plan.catalogue().variables().len()];
        GradientMemory { buffer: Arc::new(buffer), present, staged: Arc::default() }
    }

    /// Whether no push sends from it any more.
    pub(crate) fn is_free(&self) -> bool {
        Arc::strong_count(&self.buffer) == 1 && Arc::strong_count(&self.staged) == 1
    }

    pub(crate) fn buffer_mut(&mut self) -> &mut GradientBuffer {
        let buffer = Arc::get_mut(&mut self.buffer);
        buffer.expect("no push sends from the memory of new gradients")
    }

    pub(crate) fn staged_mut(&mut self) -> &mut StagedParts {
        let staged = Arc::get_mut(&mut self.staged);
        staged.expect("no push sends from the memory of new gradients")
    }

    pub(crate) fn rows(&self) -> &RowGradients {
        &self.staged.rows
    }

    pub(crate) fn rows_mut(&mut self) -> &mut RowGradients {
        &mut self.staged_mut().rows
    }

    pub(crate) fn present(&self) -> impl Iterator<Item = VariableId> + '_ {
        let present = self.present.iter().enumerate().filter(|(_, present)| **present);
        present.map(|(index, _)| VariableId(index as u32))
    }
}

#[cfg(test)]
mod tests {
    use pushpull_common::partition::Partitioner;
    use pushpull_common::tensor::{DType, Shape};
    use pushpull_common::variable::VariableSpec;

    use super::*;
    use crate::testing::plans::plan_of;

    /// A partitioned `w` of 3 x 2, a `b` of one element, and a plain `count`.
    fn plan() -> Arc<ShardingPlan> {
        let split = Partitioner::Fixed { shards: 2 };
        let variables = vec![
            VariableSpec::f32("w", [3, 2]).unwrap().partitioner(split),
            VariableSpec::f32("b", [1]).unwrap(),
            VariableSpec::new("count", DType::I64, Shape::new([2]).unwrap()).unwrap().plain(),
        ];
        plan_of(variables, 2)
    }

    fn gradients() -> Gradients {
        let plan = plan();
        Gradients::new(plan.clone(), GradientMemory::new(&plan, Arc::default()))
    }

    fn unknown(name: &str) -> ViewError {
        ViewError::Unknown { name: name.to_owned() }
    }

    #[test]
    fn views_are_whole_variables_of_their_type() {
        let mut params = Params::new(plan());
        params.view_mut::<f32>("w").unwrap().copy_from_slice(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        params.view_mut::<i64>("count").unwrap()[1] = -7;
        let [w, b] = params.views::<f32, 2>(["w", "b"]).unwrap();
        assert_eq!((w.len(), w[5], b), (6, 6.0, &[0.0][..]));
        assert_eq!(params.view::<i64>("count").unwrap(), [0, -7]);
        assert_eq!(params.view::<f32>("x").unwrap_err(), unknown("x"));
        let name = "b".to_owned();
        let asked = DType::F64;
        let dtype = DType::F32;
        assert_eq!(params.view::<f64>("b").unwrap_err(), ViewError::Type { name, asked, dtype });
    }

    #[test]
    fn viewed_variables_are_pushed_unless_omitted() {
        let mut gradients = gradients();
        assert_eq!(gradients.present().count(), 0);
        let [b, w] = gradients.views_mut::<f32, 2>(["b", "w"]).unwrap();
        b[0] = 1.0;
        w[0] = 2.0;
        assert_eq!(gradients.present().collect::<Vec<_>>(), [VariableId(0), VariableId(1)]);
        gradients.omit("w").unwrap();
        assert_eq!(gradients.present().collect::<Vec<_>>(), [VariableId(1)]);
        assert_eq!(gradients.omit("x").unwrap_err(), unknown("x"));
    }

    #[test]
    fn a_first_view_is_zero_in_memory_that_an_earlier_push_has_used() {
        let plan = plan();
        let views = |gradients: &mut Gradients| {
            let [b, w] = gradients.views_mut::<f32, 2>(["b", "w"]).unwrap();
            [b.to_vec(), w.to_vec()].concat()
        };
        let mut gradients =
            Gradients::new(plan.clone(), GradientMemory::new(&plan, Arc::default()));
        for round in 0..3 {
            assert_eq!(views(&mut gradients), [0.0; 7], "round {round}");
            gradients.view_mut::<f32>("w").unwrap()[5] += 2.0;
            gradients.view_mut::<f32>("b").unwrap()[0] += 1.0;
            assert_eq!(views(&mut gradients), [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.0]);
            gradients.omit("w").unwrap();
            assert_eq!(views(&mut gradients)[1..], [0.0; 6], "what was omitted begins again");
            gradients.view_mut::<f32>("w").unwrap().fill(7.0);
            gradients = Gradients::new(plan.clone(), gradients.memory);
        }
        assert_eq!(gradients.view_mut_unfilled::<f32>("w").unwrap(), [7.0; 6]);
        assert_eq!(gradients.view_mut::<f32>("w").unwrap(), [7.0; 6], "it is not a first view");
    }

    #[test]
    fn invalid_views_leave_the_push_unchanged() {
        let mut gradients = gradients();
        let twice = gradients.views_mut::<f32, 3>(["w", "b", "w"]).unwrap_err();
        assert_eq!(twice, ViewError::Twice { name: "w".to_owned() });
        let plain = gradients.view_mut::<i64>("count").unwrap_err();
        assert_eq!(plain, ViewError::Plain { name: "count".to_owned() });
        assert_eq!(gradients.views_mut::<f32, 2>(["b", "x"]).unwrap_err(), unknown("x"));
        assert_eq!(gradients.present().count(), 0);
    }

    /// Empty variables share a position in the buffer.
    #[test]
    fn empty_variables_are_distinct() {
        let variables = ["a", "b"].map(|name| VariableSpec::f32(name, [0]).unwrap()).to_vec();
        let plan = plan_of(variables, 1);
        let mut gradients =
            Gradients::new(plan.clone(), GradientMemory::new(&plan, Arc::default()));
        let [a, b] = gradients.views_mut::<f32, 2>(["a", "b"]).unwrap();
        assert!(a.is_empty() && b.is_empty());
        let twice = gradients.views_mut::<f32, 2>(["a", "a"]).map(|_| ());
        assert_eq!(twice.unwrap_err(), ViewError::Twice { name: "a".to_owned() });
    }
}
