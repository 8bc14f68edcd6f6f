//! [`EmbeddingBag`]: a classifier of bags of ids.

use crate::device::Device;
use crate::error::{ComputeError, check_length};
use crate::kernels::activation::Activation;
use crate::kernels::embedding_bag::{Bags, Combiner};
use crate::kernels::gemm::Matrix;
use crate::memory::{View, ViewMut};
use crate::networks::scratch_buffer::ScratchBuffer;
use crate::networks::{Network, classes, tensors, tensors_mut};

/// A classifier of bags of ids: the embeddings of a bag are combined, and one linear layer gives
/// the logits of the classes. The loss is the cross entropy of their softmax.
///
/// The parameters are the table of shape `[rows, width]`, the weights of shape `[width, classes]`,
/// and the biases of shape `[classes]`. They lie in the memory of the device.
///
/// The table may be a whole variable. It may as well be the rows that a batch needs, as
/// `Worker::pull_rows` delivers them: [`Bags::distinct`] returns the ids to pull and the bags of
/// positions in them, and the gradient by the table then has one row for each pulled one, which
/// `Gradients::set_rows` takes.
///
/// ```
/// use pushpull_device::{Bags, Device, EmbeddingBag, LabelledBags, Network};
///
/// let mut model = EmbeddingBag::new(Device::cpu()?, 100, 2, 3);
/// // Two bags: the ids 70, 9 and 70, and the id 9.
/// let (ids, positions) = Bags::distinct(&[70, 9, 70, 9]);
/// assert_eq!((&ids[..], &positions[..]), (&[9, 70][..], &[1, 0, 1, 0][..]));
/// let bags = Bags::new(&positions, &[3, 4])?;
///
/// let (rows, weights, biases) = ([0.5, -0.5, 0.25, 1.0], [0.0; 6], [0.0; 3]);
/// let (mut by_rows, mut by_weights, mut by_biases) = ([0.0; 4], [0.0; 6], [0.0; 3]);
/// let loss = model.gradients(
///     &[(&rows).into(), (&weights).into(), (&biases).into()],
///     LabelledBags { bags, labels: &[2, 0] },
///     vec![(&mut by_rows).into(), (&mut by_weights).into(), (&mut by_biases).into()],
/// )?;
/// assert!((loss - 3_f64.ln()).abs() < 1e-6, "all classes are equally likely");
/// # Ok::<(), pushpull_device::ComputeError>(())
/// ```
#[derive(Clone, Debug)]
pub struct EmbeddingBag {
    device: Device,
    rows: usize,
    width: usize,
    classes: usize,
    combiner: Combiner,
    embedded: ScratchBuffer,
    sums: ScratchBuffer,
    logits: ScratchBuffer,
    by_embedded: ScratchBuffer,
}

/// Borrowed bags with the class of each, in the processor's memory.
#[derive(Clone, Copy, Debug)]
pub struct LabelledBags<'a> {
    /// The ids of each sample: rows of the table.
    pub bags: Bags<'a>,
    /// The class of each sample.
    pub labels: &'a [u32],
}

const NAME: &str = "EmbeddingBag";

impl EmbeddingBag {
    /// Creates a classifier with a table of `rows` embeddings of `width` values, and
    /// [`Combiner::Mean`].
    pub fn new(device: Device, rows: usize, width: usize, classes: usize) -> EmbeddingBag {
        EmbeddingBag {
            device,
            rows,
            width,
            classes,
            combiner: Combiner::Mean,
            embedded: ScratchBuffer::default(),
            sums: ScratchBuffer::default(),
            logits: ScratchBuffer::default(),
            by_embedded: ScratchBuffer::default(),
        }
    }

    /// Sets the reduction of the embeddings of a bag to one row. Default [`Combiner::Mean`].
    pub fn combiner(mut self, combiner: Combiner) -> EmbeddingBag {
        self.combiner = combiner;
        self
    }

    /// Returns the logits of each bag: one row per bag, one column per class.
    ///
    /// # Errors
    /// [`ComputeError::Length`] if a tensor does not have the length of its shape;
    /// [`ComputeError::Id`].
    pub fn logits(
        &mut self,
        params: &[View<'_, f32>],
        bags: Bags<'_>,
    ) -> Result<View<'_, f32>, ComputeError> {
        self.forward(tensors(NAME, params)?, bags)?;
        Ok(self.logits.view())
    }

    /// Returns the share of bags whose label has the single greatest logit. Ties and NaN count as
    /// wrong. The share of no bags is zero.
    ///
    /// # Errors
    /// The errors of [`EmbeddingBag::logits`]; [`ComputeError::Length`] if there are not as many
    /// labels as bags.
    pub fn accuracy(
        &mut self,
        params: &[View<'_, f32>],
        samples: LabelledBags<'_>,
    ) -> Result<f64, ComputeError> {
        let LabelledBags { bags, labels } = samples;
        check_length(NAME, "labels", labels.len(), bags.len())?;
        let device = self.device.clone();
        let correct = classes::correct(&device, self.logits(params, bags)?, labels)?;
        Ok(correct as f64 / labels.len().max(1) as f64)
    }

    fn forward(
        &mut self,
        [table, weights, biases]: [View<'_, f32>; 3],
        bags: Bags<'_>,
    ) -> Result<(), ComputeError> {
        let width = self.width;
        let classes = self.classes;
        let rows = bags.len();
        check_length(NAME, "biases", biases.len(), classes)?;
        let weights = Matrix::new(weights, width, classes)?;
        self.embedded.fit(&self.device, rows * width)?;
        self.sums.fit(&self.device, rows * classes)?;
        self.logits.fit(&self.device, rows * classes)?;
        let embedded = self.embedded.view_mut();
        self.device.embedding_bag(self.combiner, table, width, bags, embedded)?;
        let embedded = Matrix::new(self.embedded.view(), rows, width)?;
        self.device.multiply(embedded, weights, 0.0, self.sums.view_mut())?;
        let sums = self.sums.view_mut();
        let logits = self.logits.view_mut();
        self.device.activate(Activation::Identity, biases, sums, logits)
    }
}

/// Natural logarithms. The table may have any number of rows.
///
/// Cost: the gradient by the table is written whole, so give a table of the rows of the batch if it
/// is large.
///
/// Errors are also [`ComputeError::Empty`] without labels, [`ComputeError::Length`] if there are
/// not as many bags as labels, [`ComputeError::Label`] and [`ComputeError::Id`].
impl Network<LabelledBags<'_>> for EmbeddingBag {
    fn device(&self) -> &Device {
        &self.device
    }

    fn shapes(&self) -> Vec<Vec<u64>> {
        let [rows, width, classes] = [self.rows, self.width, self.classes].map(|size| size as u64);
        vec![vec![rows, width], vec![width, classes], vec![classes]]
    }

    fn gradients(
        &mut self,
        params: &[View<'_, f32>],
        batch: LabelledBags<'_>,
        gradients: Vec<ViewMut<'_, f32>>,
    ) -> Result<f64, ComputeError> {
        let params = tensors(NAME, params)?;
        let gradients = tensors_mut(NAME, gradients)?;
        let [table, weights, _] = params;
        let [mut by_table, by_weights, by_biases] = gradients;
        let LabelledBags { bags, labels } = batch;
        check_length(NAME, "the gradient by the table", by_table.len(), table.len())?;
        check_length(NAME, "the gradient by the weights", by_weights.len(), weights.len())?;
        check_length(NAME, "the gradient by the biases", by_biases.len(), self.classes)?;
        check_length(NAME, "labels", labels.len(), bags.len())?;
        let device = self.device.clone();
        let width = self.width;
        let classes = self.classes;
        let rows = labels.len();
        self.forward(params, bags)?;
        let loss = device.softmax_cross_entropy(self.logits.view_mut(), classes, labels)?;
        let sums = self.sums.view();
        let by_logits = self.logits.view_mut();
        // The activation is the identity, so what it computed does not matter.
        device.activate_back(Activation::Identity, sums, sums, by_logits, by_biases)?;
        let by_logits = Matrix::new(self.logits.view(), rows, classes)?;
        let embedded = Matrix::new(self.embedded.view(), rows, width)?;
        device.multiply(embedded.transposed(), by_logits, 0.0, by_weights)?;
        self.by_embedded.fit(&device, rows * width)?;
        let weights = Matrix::new(weights, width, classes)?;
        device.multiply(by_logits, weights.transposed(), 0.0, self.by_embedded.view_mut())?;
        device.fill(0.0, by_table.reborrow())?;
        device.embedding_bag_add(self.combiner, by_table, width, bags, self.by_embedded.view())?;
        Ok(loss)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{assert_close, assert_gradients, random};

    #[test]
    fn gradients_are_the_derivatives_of_the_loss() {
        let rows = 9;
        let width = 4;
        let classes = 3;
        // An empty bag, an id twice in one bag, and an id of two bags.
        let ids = [3, 8, 3, 0, 5, 8, 2];
        let ends = [3, 3, 5, 7];
        let bags = Bags::new(&ids, &ends).unwrap();
        let labels = [2, 0, 1, 2];
        let params = [random(1, rows * width), random(2, width * classes), random(3, classes)];
        for combiner in [Combiner::Sum, Combiner::Mean] {
            let device = Device::cpu_threads(2).unwrap();
            let mut model = EmbeddingBag::new(device, rows, width, classes).combiner(combiner);
            let loss_of = |params: [&[f64]; 3]| {
                let mut losses = 0.0;
                for (bag, &label) in labels.iter().enumerate() {
                    let ids = &ids[bag.checked_sub(1).map_or(0, |before| ends[before])..ends[bag]];
                    let factor = match combiner {
                        Combiner::Sum => 1.0,
                        Combiner::Mean => 1.0 / ids.len().max(1) as f64,
                    };
                    let embedded = |column: usize| {
                        let rows = ids.iter().map(|&id| params[0][id as usize * width + column]);
                        factor * rows.sum::<f64>()
                    };
                    let logit = |class: usize| {
                        let products = (0..width)
                            .map(|column| embedded(column) * params[1][column * classes + class]);
                        products.sum::<f64>() + params[2][class]
                    };
                    let total: f64 = (0..classes).map(|class| logit(class).exp()).sum();
                    losses += total.ln() - logit(label as usize);
                }
                losses / labels.len() as f64
            };
            let mut found = params.clone().map(|values| vec![f32::NAN; values.len()]);
            let views = || params.each_ref().map(View::from);
            let gradients = found.iter_mut().map(ViewMut::from).collect();
            let batch = LabelledBags { bags, labels: &labels };
            let loss = model.gradients(&views(), batch, gradients).unwrap();
            let exact: [Vec<f64>; 3] =
                params.each_ref().map(|values| values.iter().map(|&x| x.into()).collect());
            assert_close(loss, loss_of(exact.each_ref().map(Vec::as_slice)), 1e-6);
            for tensor in 0..3 {
                assert_gradients(&found[tensor], &params[tensor], |values| {
                    let mut changed = exact.each_ref().map(Vec::as_slice);
                    changed[tensor] = values;
                    loss_of(changed)
                });
            }
            let logits = model.logits(&views(), bags).unwrap().as_host().unwrap().to_vec();
            let rows = logits.chunks(classes);
            let best = rows.map(|row| (0..classes).max_by(|&a, &b| row[a].total_cmp(&row[b])));
            let best: Vec<u32> = best.map(|class| class.unwrap() as u32).collect();
            let best = LabelledBags { bags, labels: &best };
            assert_eq!(model.accuracy(&views(), best).unwrap(), 1.0);
        }
    }

    #[test]
    fn a_table_of_the_rows_of_a_batch_gives_the_same_gradients() {
        let width = 3;
        let classes = 2;
        let ids = [7, 1, 7, 4, 1];
        let ends = [2, 5];
        let table = random(5, 10 * width);
        let others = [random(6, width * classes), random(7, classes)];
        let mut model = EmbeddingBag::new(Device::cpu_threads(1).unwrap(), 10, width, classes);
        let mut gradients = |table: &[f32], ids: &[u64]| {
            let mut found =
                [vec![f32::NAN; table.len()], vec![0.0; width * classes], vec![0.0; classes]];
            let params = [table.into(), (&others[0]).into(), (&others[1]).into()];
            let batch = LabelledBags { bags: Bags::new(ids, &ends).unwrap(), labels: &[1, 0] };
            let out = found.iter_mut().map(ViewMut::from).collect();
            model.gradients(&params, batch, out).unwrap();
            found
        };
        let whole = gradients(&table, &ids);
        let (distinct, positions) = Bags::distinct(&ids);
        assert_eq!((&distinct[..], &positions[..]), (&[1, 4, 7][..], &[2, 0, 2, 1, 0][..]));
        let row = |values: &[f32], id: u64| values[id as usize * width..][..width].to_vec();
        let rows: Vec<f32> = distinct.iter().flat_map(|&id| row(&table, id)).collect();
        let part = gradients(&rows, &positions);
        assert_eq!(part[1..], whole[1..]);
        for (position, &id) in distinct.iter().enumerate() {
            assert_eq!(row(&part[0], position as u64), row(&whole[0], id));
        }
        assert!(whole[0][..width].iter().all(|&x| x == 0.0), "id 0 is in no bag");
    }

    #[test]
    fn tensors_that_do_not_fit_are_refused() {
        let mut model = EmbeddingBag::new(Device::cpu_threads(1).unwrap(), 2, 2, 2);
        let mut error = |table: &[f32], ids: &[u64], labels: &[u32]| {
            let four = [0.0; 4];
            let two = [0.0; 2];
            let params = [table.into(), (&four).into(), (&two).into()];
            let mut found = [vec![0.0; table.len()], vec![0.0; 4], vec![0.0; 2]];
            let ends = [ids.len()];
            let batch = LabelledBags { bags: Bags::new(ids, &ends).unwrap(), labels };
            let out = found.iter_mut().map(ViewMut::from).collect();
            model.gradients(&params, batch, out).unwrap_err().to_string()
        };
        assert_eq!(
            error(&[0.0; 4], &[2], &[0]),
            "id 2 at position 0 is not below the 2 rows of the table"
        );
        assert_eq!(
            error(&[0.0; 3], &[0], &[0]),
            "embedding_bag needs 2 elements of the table, not 3"
        );
        assert_eq!(error(&[0.0; 4], &[0], &[2]), "label 2 of sample 0 is not below the 2 classes");
        assert_eq!(
            error(&[0.0; 4], &[0], &[0, 1]),
            "EmbeddingBag needs 1 elements of labels, not 2"
        );
    }
}
