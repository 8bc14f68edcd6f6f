//! Draws a curve with braille characters for a terminal.

use std::fmt::Write;

/// Draws losses over steps in `width` x `height` characters of 2 x 4 dots each, both clamped to
/// 2..=240.
///
/// The axes show the greatest, middle and least loss, and the first and last step. Losses in the
/// same column of dots are averaged. The vertical axis is logarithmic, and labelled so, if positive
/// losses span more than a factor of 50. Losses that are not finite are left out and counted below
/// the picture.
pub(crate) fn curve(losses: &[(u64, f64)], width: usize, height: usize) -> String {
    let width = width.clamp(2, SIDE_MAX);
    let height = height.clamp(2, SIDE_MAX);
    let finite = losses.iter().copied().filter(|(_, loss)| loss.is_finite());
    let mut finite: Vec<(u64, f64)> = finite.collect();
    finite.sort_by_key(|&(step, _)| step);
    let left_out = losses.len() - finite.len();

    let mut picture = String::new();
    if let (Some(&(first, _)), Some(&(last, _))) = (finite.first(), finite.last()) {
        let means = column_means(&finite, first, last, 2 * width);
        let scale = Scale::of(&means, 4 * height);
        frame(&mut picture, &draw(&means, &scale, width, height), &scale);
        let name = if scale.logarithmic { "log loss" } else { "loss" };
        let _ = writeln!(picture, "{name:>LABEL$} └{}", "─".repeat(width));
        steps(&mut picture, first, last, width);
    } else {
        picture.push_str("no losses to draw\n");
    }
    if left_out > 0 {
        let _ = writeln!(picture, "{left_out} of {} losses were not finite", losses.len());
    }
    picture
}

/// Returns the mean loss of each column of dots that has any, from left to right.
fn column_means(losses: &[(u64, f64)], first: u64, last: u64, columns: usize) -> Vec<(usize, f64)> {
    let mut sums = vec![(0.0, 0u32); columns];
    for &(step, loss) in losses {
        let share = (step - first) as f64 / (last - first).max(1) as f64;
        let (sum, count) = &mut sums[(share * (columns - 1) as f64).round() as usize];
        *sum += loss;
        *count += 1;
    }
    let filled = sums.into_iter().enumerate().filter(|(_, (_, count))| *count > 0);
    filled.map(|(column, (sum, count))| (column, sum / f64::from(count))).collect()
}

/// The vertical axis, which maps a loss to a row of dots, counted from the top.
struct Scale {
    greatest: f64,
    least: f64,
    logarithmic: bool,
    dots: usize,
}

impl Scale {
    fn of(means: &[(usize, f64)], dots: usize) -> Scale {
        let mut least = f64::INFINITY;
        let mut greatest = f64::NEG_INFINITY;
        for &(_, mean) in means {
            least = least.min(mean);
            greatest = greatest.max(mean);
        }
        // A linear axis would flatten all but the first steps of a successful training.
        let logarithmic = least > 0.0 && greatest / least > LOGARITHMIC_FROM;
        Scale { greatest, least, logarithmic, dots }
    }

    fn is_constant(&self) -> bool {
        self.greatest <= self.least
    }

    fn row(&self, loss: f64) -> usize {
        let share = if self.is_constant() {
            // A constant is drawn in the middle.
            0.5
        } else if self.logarithmic {
            (self.greatest / loss).ln() / (self.greatest / self.least).ln()
        } else {
            (self.greatest - loss) / (self.greatest - self.least)
        };
        (share * (self.dots - 1) as f64).round() as usize
    }

    /// Returns the loss halfway down the axis.
    fn middle(&self) -> f64 {
        if self.logarithmic {
            (self.greatest * self.least).sqrt()
        } else {
            (self.greatest + self.least) / 2.0
        }
    }
}

/// Returns the lines of the picture without its frame. Neighbouring points are joined.
fn draw(means: &[(usize, f64)], scale: &Scale, width: usize, height: usize) -> Vec<String> {
    let mut cells = vec![0u8; width * height];
    let mut dot = |column: usize, row: usize| {
        cells[row / 4 * width + column / 2] |= DOTS[row % 4][column % 2];
    };
    let points: Vec<(usize, usize)> =
        means.iter().map(|&(column, mean)| (column, scale.row(mean))).collect();
    for &(column, row) in &points {
        dot(column, row);
    }
    for pair in points.windows(2) {
        let (left, from) = pair[0];
        let (right, to) = pair[1];
        let dots = (right - left).max(from.abs_diff(to));
        for index in 1..dots {
            let share = index as f64 / dots as f64;
            let between = |a: usize, b: usize| (a as f64 + share * (b as f64 - a as f64)).round();
            dot(between(left, right) as usize, between(from, to) as usize);
        }
    }
    let braille = |&cell: &u8| match cell {
        0 => ' ',
        _ => char::from_u32(0x2800 + u32::from(cell)).unwrap_or(' '),
    };
    cells.chunks(width).map(|line| line.iter().map(braille).collect()).collect()
}

/// Appends the lines with the vertical axis on their left.
fn frame(picture: &mut String, lines: &[String], scale: &Scale) {
    let middle = scale.row(scale.middle()) / 4;
    for (index, line) in lines.iter().enumerate() {
        let value = if scale.is_constant() {
            (index == middle).then_some(scale.greatest)
        } else if index == 0 {
            Some(scale.greatest)
        } else if index + 1 == lines.len() {
            Some(scale.least)
        } else {
            (index == middle).then(|| scale.middle())
        };
        let (tick, label) = value.map_or(('│', String::new()), |value| ('┤', label(value)));
        let _ = writeln!(picture, "{label:>LABEL$} {tick}{}", line.trim_end());
    }
}

fn label(loss: f64) -> String {
    if loss != 0.0 && !(1e-3..1e4).contains(&loss.abs()) {
        format!("{loss:.1e}")
    } else {
        format!("{loss:.3}")
    }
}

/// Appends the first and the last step below the horizontal axis.
fn steps(picture: &mut String, first: u64, last: u64, width: usize) {
    let first = format!("step {first}");
    let last = if first == format!("step {last}") { String::new() } else { last.to_string() };
    let last_width = width.saturating_sub(first.len()).max(last.len() + 1);
    let line = format!("{:LABEL$}  {first}{last:>last_width$}", "");
    let _ = writeln!(picture, "{}", line.trim_end());
}

/// Bit of each dot in a braille character, by row and column (Unicode, block U+2800).
const DOTS: [[u8; 2]; 4] = [[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]];

/// Ratio of the greatest to the least loss above which the axis is logarithmic.
const LOGARITHMIC_FROM: f64 = 50.0;

/// Number of characters left of the vertical axis.
const LABEL: usize = 8;

/// Maximum width and height in characters, more than any terminal needs.
const SIDE_MAX: usize = 240;

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(picture: &str) -> Vec<&str> {
        picture.lines().collect()
    }

    #[test]
    fn a_straight_line_reaches_both_corners() {
        let losses: Vec<(u64, f64)> = (0..8).map(|step| (step, 7.0 - step as f64)).collect();
        let expected = ["   7.000 ┤⠑⢄", "   0.000 ┤  ⠑⢄", "    loss └────", "          step 0 7"];
        assert_eq!(lines(&curve(&losses, 4, 2)), expected);
    }

    #[test]
    fn distant_points_are_joined() {
        let expected = [
            "   1.000 ┤⠑⢄",
            "         │  ⠑⢄",
            "   0.500 ┤    ⠑⢄",
            "         │      ⠑⢄",
            "   0.000 ┤        ⠑⢄",
            "    loss └──────────",
            "          step 100 900",
        ];
        assert_eq!(lines(&curve(&[(100, 1.0), (900, 0.0)], 10, 5)), expected);
    }

    #[test]
    fn an_exponential_decay_is_straight_on_a_logarithmic_axis() {
        let losses: Vec<(u64, f64)> =
            (0..12u8).map(|step| (step.into(), 0.1f64.powi(step.into()))).collect();
        let expected = [
            "   1.000 ┤⠑⢄",
            "  3.2e-6 ┤  ⠑⢄",
            " 1.0e-11 ┤    ⠑⢄",
            "log loss └──────",
            "          step 0 11",
        ];
        assert_eq!(lines(&curve(&losses, 6, 3)), expected);
    }

    #[test]
    fn a_curve_without_finite_losses_is_a_message() {
        assert_eq!(curve(&[], 40, 8), "no losses to draw\n");
        let picture = curve(&[(1, f64::NAN), (2, f64::INFINITY)], 40, 8);
        assert_eq!(picture, "no losses to draw\n2 of 2 losses were not finite\n");
    }

    #[test]
    fn a_constant_is_a_level_line_in_the_middle() {
        let picture = curve(&[(0, 0.5), (10, 0.5), (20, 0.5)], 6, 3);
        let expected = [
            "         │",
            "   0.500 ┤⠤⠤⠤⠤⠤⠤",
            "         │",
            "    loss └──────",
            "          step 0 20",
        ];
        assert_eq!(lines(&picture), expected);
    }

    #[test]
    fn one_point_has_one_step() {
        let picture = curve(&[(u64::MAX, 1e-9)], 20, 3);
        assert!(picture.contains("  1.0e-9 ┤"), "{picture}");
        assert_eq!(lines(&picture)[4], "          step 18446744073709551615");
    }

    #[test]
    fn non_finite_losses_are_left_out_and_counted() {
        let picture = curve(&[(0, 2.0), (1, f64::NAN), (2, 1.0), (3, f64::NEG_INFINITY)], 20, 3);
        assert!(picture.ends_with("2 of 4 losses were not finite\n"), "{picture}");
        assert!(picture.contains("   2.000 ┤") && picture.contains("   1.000 ┤"), "{picture}");
    }

    #[test]
    fn extreme_and_unsorted_losses_stay_within_the_frame() {
        let losses = [(u64::MAX, f64::MAX), (0, f64::MIN), (9, f64::MIN_POSITIVE), (9, -0.0)];
        for side in [0, 1, 2, 7, usize::MAX] {
            let picture = curve(&losses, side, side);
            let height = side.clamp(2, SIDE_MAX);
            assert_eq!(lines(&picture).len(), height + 2);
            for line in &lines(&picture)[..height] {
                assert!(line.chars().count() <= LABEL + 2 + height);
            }
        }
    }
}
