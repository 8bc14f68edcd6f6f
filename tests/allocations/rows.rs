//! Steps with rows of sparse variables and tables.

use pushpull::blocking::Worker;
use pushpull::variable::{DType, Partitioner, Shape, TableSpec, bf16, f16};
use pushpull::{Token, VariableSpec};

use crate::cluster::{AllocationCase, GradientElement, check_counted, training, write};
use crate::counting::{WARM_UP, counted};

/// Returns the bulk allocations of worker and servers in a step with rows: with whole gradients,
/// and with a streaming push. The variables are a sparse one, partitioned ones, and tables that
/// have all the pushed rows.
pub(crate) fn per_step(case: &AllocationCase) -> [[f64; 2]; 2] {
    let split = Partitioner::Fixed { shards: u32::from(case.shards) };
    let width = case.elements;
    let dtype = case.form.dtype;
    let shape = |extents: &[u64]| Shape::new(extents).unwrap();
    let rows = |name| VariableSpec::new(name, dtype, shape(&[ROWS, width])).unwrap().sparse();
    let table = |name, bytes| {
        let spec = TableSpec::new(bytes);
        VariableSpec::table(name, dtype, [width], spec).unwrap().partitioner(split.clone())
    };
    // Many sparse variables with dense ones between them, so that a push has many runs.
    let mut variables = Vec::from(SPARSE.map(|name| rows(name).partitioner(split.clone())));
    variables[0] = rows("whole");
    // The first table is nearly full, so every push is checked for new rows. With two shards,
    // either may have somewhat more than half of the rows. The second table has much free capacity.
    let row = (width * dtype.master().size() as u64).next_multiple_of(8);
    variables[1] = table("table", (row + TableSpec::ROW_OVERHEAD_BYTES) * (ROWS + ROWS / 8));
    variables[2] = table("roomy", 1 << 20);
    let dense = DENSE.map(|name| VariableSpec::new(name, dtype, shape(&[3])).unwrap());
    dense.into_iter().enumerate().for_each(|(index, dense)| variables.insert(2 * index, dense));
    training(case, &variables, |worker, _| match dtype {
        DType::F16 => steps::<f16>(case, worker),
        DType::Bf16 => steps::<bf16>(case, worker),
        DType::F64 => steps::<f64>(case, worker),
        _ => steps::<f32>(case, worker),
    })
}

fn steps<T: GradientElement>(case: &AllocationCase, worker: &mut Worker) -> [[f64; 2]; 2] {
    let mut rows = Rows::<T>::new(case.elements as usize);
    rows.fill(worker);
    (0..WARM_UP).for_each(|_| rows.step(worker));
    let whole = counted(case.steps, || rows.step(worker));
    (0..WARM_UP).for_each(|_| rows.streamed(worker));
    let streamed = counted(case.steps, || rows.streamed(worker));
    [whole, streamed]
}

/// The rows of each of the variables.
const ROWS: u64 = 300;

/// The most rows of one variable in a step.
const ROWS_PER_STEP_MAX: usize = 64;

const SPARSE: [&str; 9] = ["whole", "table", "roomy", "a", "b", "c", "d", "e", "f"];

/// Enough dense variables that a push buffer has more runs than one frame can name.
const DENSE: [&str; 9] = ["1", "2", "3", "4", "5", "6", "7", "8", "9"];

/// The rows of each step: their number varies, they are sorted or not, and some occur twice.
struct Rows<T> {
    width: usize,
    step: usize,
    ids: [u64; ROWS_PER_STEP_MAX],
    values: Vec<T>,
}

impl<T: GradientElement> Rows<T> {
    fn new(width: usize) -> Rows<T> {
        let values = vec![T::of(1.0); ROWS as usize * width];
        Rows { width, step: 0, ids: [0; ROWS_PER_STEP_MAX], values }
    }

    /// Adds all rows to the tables.
    fn fill(&self, worker: &mut Worker) {
        let token = worker.token().unwrap().unwrap();
        let mut gradients = worker.gradients();
        let ids: Vec<u64> = (0..ROWS).collect();
        for name in ["table", "roomy"] {
            gradients.set_rows(name, &ids, &self.values).unwrap();
        }
        worker.push(token, gradients).unwrap();
    }

    /// Draws the ids of the next step; returns their number.
    fn draw(&mut self) -> usize {
        self.step += 1;
        let count = ROWS_PER_STEP_MAX - self.step % 7;
        let each = if self.step.is_multiple_of(2) { 4 } else { 37 };
        let start = self.step as u64;
        for (index, id) in self.ids.iter_mut().enumerate() {
            *id = (start + index as u64 * each) % ROWS;
        }
        self.ids[count - 1] = self.ids[if self.step.is_multiple_of(3) { 0 } else { count - 1 }];
        count
    }

    fn pull(&mut self, worker: &mut Worker, token: &Token, count: usize) {
        for name in SPARSE {
            let values = &mut self.values[..count * self.width];
            worker.pull_rows(token, name, &self.ids[..count], values).unwrap();
        }
        write(&mut self.values, self.step);
    }

    fn step(&mut self, worker: &mut Worker) {
        let token = worker.token().unwrap().unwrap();
        let count = self.draw();
        self.pull(worker, &token, count);
        let mut gradients = worker.gradients();
        for name in DENSE {
            gradients.view_mut::<T>(name).unwrap()[0] = T::of(1.0);
        }
        for name in SPARSE {
            let values = &self.values[..count * self.width];
            gradients.set_rows(name, &self.ids[..count], values).unwrap();
        }
        check_counted(&worker.push(token, gradients).unwrap());
    }

    fn streamed(&mut self, worker: &mut Worker) {
        let token = worker.token().unwrap().unwrap();
        let count = self.draw();
        self.pull(worker, &token, count);
        let mut push = worker.begin(token).unwrap();
        for name in SPARSE {
            push.rows(name, &self.ids[..count], &self.values[..count * self.width]).unwrap();
        }
        check_counted(&push.finish().unwrap());
    }
}
